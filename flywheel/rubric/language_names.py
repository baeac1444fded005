"""Names of languages: what a rubric may call them, and what a question may."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

NAMES: Final = MappingProxyType(
    {
        "af": ("Afrikaans",),
        "am": ("Amharic", "አማርኛ"),
        "ar": ("Arabic", "العربية", "عربي"),
        "az": ("Azerbaijani", "azərbaycan"),
        "be": ("Belarusian", "беларуск"),
        "bg": ("Bulgarian", "българск"),
        "bn": ("Bengali", "Bangla", "বাংলা"),
        "bs": ("Bosnian", "bosansk"),
        "ca": ("Catalan", "català"),
        "cs": ("Czech", "česk", "češtin"),
        "cy": ("Welsh", "Cymraeg"),
        "da": ("Danish", "dansk"),
        "de": ("German", "deutsch", "alemán", "allemand", "tedesco", "немецк", "德语", "德文", "ドイツ語"),
        "el": ("Greek", "ελληνικ"),
        "en": ("English", "englisch", "anglais", "inglés", "inglês", "inglese", "английск", "英语", "英文", "英語"),
        "eo": ("Esperanto",),
        "es": ("Spanish", "español", "castellano", "spanisch", "espagnol", "spagnolo", "испанск", "西班牙语"),
        "et": ("Estonian", "eesti"),
        "eu": ("Basque", "euskar"),
        "fa": ("Persian", "Farsi", "فارسی"),
        "fi": ("Finnish", "suomi", "suomek"),
        "fr": ("French", "français", "französisch", "francés", "francese", "французск", "法语", "法文", "フランス語"),
        "ga": ("Irish", "Gaeilge"),
        "gl": ("Galician", "galego"),
        "gu": ("Gujarati", "ગુજરાતી"),
        "he": ("Hebrew", "עברית"),
        "hi": ("Hindi", "हिन्दी", "हिंदी"),
        "hr": ("Croatian", "hrvatsk"),
        "hu": ("Hungarian", "magyar"),
        "hy": ("Armenian", "հայերեն"),
        "id": ("Indonesian", "bahasa indonesia"),
        "is": ("Icelandic", "íslensk"),
        "it": ("Italian", "italiano", "italienisch", "italien", "итальянск", "意大利语", "イタリア語"),
        "ja": ("Japanese", "日本語", "日语", "日文", "japanisch", "japonais", "japonés", "японск"),
        "ka": ("Georgian", "ქართულ"),
        "kk": ("Kazakh", "қазақ"),
        "kn": ("Kannada", "ಕನ್ನಡ"),
        "ko": ("Korean", "한국어", "韩语", "韓国語"),
        "la": ("Latin",),
        "lt": ("Lithuanian", "lietuvi"),
        "lv": ("Latvian", "latviešu", "latvisk"),
        "mk": ("Macedonian", "македонск"),
        "ml": ("Malayalam", "മലയാളം"),
        "mn": ("Mongolian", "монгол"),
        "mr": ("Marathi", "मराठी"),
        "ms": ("Malay", "bahasa melayu"),
        "ne": ("Nepali", "नेपाली"),
        "nl": ("Dutch", "nederlands", "niederländisch", "néerlandais"),
        "no": ("Norwegian", "norsk", "Bokmål", "Nynorsk"),
        "pa": ("Punjabi", "ਪੰਜਾਬੀ"),
        "pl": ("Polish", "polsk", "polnisch", "polonais"),
        "pt": ("Portuguese", "português", "portugiesisch", "portugais", "portugués", "葡萄牙语"),
        "ro": ("Romanian", "român"),
        "ru": ("Russian", "русск", "по-русски", "russisch", "russe", "ruso", "俄语", "俄文", "ロシア語"),
        "sk": ("Slovak", "slovensk", "slovenčin"),
        "sl": ("Slovene", "Slovenian", "slovenšči"),
        "sq": ("Albanian", "shqip"),
        "sr": ("Serbian", "српск", "srpsk"),
        "sv": ("Swedish", "svensk"),
        "sw": ("Swahili", "kiswahili"),
        "ta": ("Tamil", "தமிழ்"),
        "te": ("Telugu", "తెలుగు"),
        "th": ("Thai", "ภาษาไทย"),
        "tl": ("Tagalog", "Filipino"),
        "tr": ("Turkish", "türkçe"),
        "uk": ("Ukrainian", "українськ"),
        "ur": ("Urdu", "اردو"),
        "uz": ("Uzbek", "oʻzbek", "o'zbek"),
        "vi": ("Vietnamese", "tiếng việt"),
        "zh": ("Chinese", "Mandarin", "中文", "汉语", "漢語", "chinesisch", "chinois", "chino", "китайск", "中国語"),
    }
)  # fmt: skip
"""ISO 639-1 codes with the English name, then stems of the own name and of what neighbours call it."""


def code_of(name: str) -> str | None:
    """The code of a language that is given by its code (`de`, `de-AT`), English or own name."""
    wanted = name.strip().casefold()
    if (code := wanted.replace("_", "-").partition("-")[0]) in NAMES:
        return code
    return next((code for code, names in NAMES.items() if wanted in (each.casefold() for each in names)), None)


def english_name(code: str) -> str:
    return NAMES[code][0] if code in NAMES else code
