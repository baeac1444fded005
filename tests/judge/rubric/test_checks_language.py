"""The language check: what is plainly another language is found, and nothing that is short, mixed or meant so is."""

# ruff: noqa: E501 - sentences are not broken
from __future__ import annotations

import itertools

from flywheel.judge.rubric.checks import check
from flywheel.judge.rubric.checks.language import Language
from flywheel.records.verdict import CriterionResult, Exchange
from tests.cases import for_each
from tests.judge.legitimate import LEGITIMATE

QUESTIONS = {
    "en": "What is the Pythagorean theorem and how do I use it to find the longest side of a triangle?",
    "de": "Wie lautet der Satz des Pythagoras und wie berechne ich damit die längste Seite eines Dreiecks?",
    "fr": "Quel est le théorème de Pythagore et comment trouver avec lui le plus grand côté d'un triangle ?",
    "es": "¿Cuál es el teorema de Pitágoras y cómo lo uso para hallar el lado más largo de un triángulo?",
    "pl": "Jak brzmi twierdzenie Pitagorasa i jak obliczyć za jego pomocą najdłuższy bok trójkąta?",
    "tr": "Pisagor teoremi nedir ve bir üçgenin en uzun kenarını bulmak için onu nasıl kullanırım?",
    "vi": "Định lý Pythagoras là gì và làm thế nào để dùng nó tìm cạnh dài nhất của một tam giác?",
    "fi": "Mikä on Pythagoraan lause ja miten lasken sen avulla kolmion pisimmän sivun pituuden?",
    "ru": "Как звучит теорема Пифагора и как с её помощью найти самую длинную сторону треугольника?",
    "el": "Τι λέει το πυθαγόρειο θεώρημα και πώς βρίσκω με αυτό τη μεγαλύτερη πλευρά ενός τριγώνου;",
    "zh": "勾股定理是什么？我怎样用它来求三角形最长的一条边？",
    "ja": "三平方の定理とは何ですか。それを使って三角形の一番長い辺をどうやって求めますか。",
    "ko": "피타고라스 정리는 무엇이며 그것으로 삼각형의 가장 긴 변을 어떻게 구하나요?",
    "ar": "ما هي نظرية فيثاغورس وكيف أستخدمها لإيجاد أطول ضلع في المثلث؟",
    "hi": "पाइथागोरस प्रमेय क्या है और मैं इससे त्रिभुज की सबसे लंबी भुजा कैसे निकालूँ?",
    "th": "ทฤษฎีบทพีทาโกรัสคืออะไร และฉันจะใช้มันหาด้านที่ยาวที่สุดของรูปสามเหลี่ยมได้อย่างไร",
}
ANSWERS = {
    "en": "The square of the longest side is the sum of the squares of the other two. Square them, add, take the root.",
    "de": "Das Quadrat der längsten Seite ist die Summe der Quadrate der beiden anderen. Quadriere, addiere, ziehe die Wurzel.",
    "fr": "Le carré du plus grand côté est la somme des carrés des deux autres. Il suffit de les ajouter et de prendre la racine.",
    "es": "El cuadrado del lado más largo es la suma de los cuadrados de los otros dos. Súmalos y saca la raíz cuadrada.",
    "pl": "Kwadrat najdłuższego boku jest sumą kwadratów dwóch pozostałych. Należy je dodać i wyciągnąć pierwiastek.",
    "tr": "En uzun kenarın karesi diğer iki kenarın kareleri toplamına eşittir. Kareleri toplayıp karekökünü alın.",
    "vi": "Bình phương của cạnh dài nhất bằng tổng bình phương của hai cạnh kia. Hãy cộng chúng lại rồi lấy căn bậc hai.",
    "fi": "Pisimmän sivun neliö on kahden muun sivun neliöiden summa. Laske ne yhteen ja ota summasta neliöjuuri.",
    "ru": "Квадрат самой длинной стороны равен сумме квадратов двух других. Сложите их и извлеките корень.",
    "el": "Το τετράγωνο της μεγαλύτερης πλευράς είναι το άθροισμα των τετραγώνων των άλλων δύο πλευρών του.",
    "zh": "最长边的平方等于另外两条边的平方之和。把它们相加，再开平方，就得到最长的边。",
    "ja": "一番長い辺の二乗は、残りの二つの辺の二乗の和に等しいです。足してから平方根を取ります。",
    "ko": "가장 긴 변의 제곱은 나머지 두 변의 제곱의 합과 같습니다. 더한 다음 제곱근을 구하세요.",
    "ar": "مربع أطول ضلع يساوي مجموع مربعي الضلعين الآخرين. اجمعهما ثم خذ الجذر التربيعي للمجموع.",
    "hi": "सबसे लंबी भुजा का वर्ग बाकी दो भुजाओं के वर्गों के योग के बराबर होता है। उन्हें जोड़कर वर्गमूल लें।",
    "th": "กำลังสองของด้านที่ยาวที่สุดเท่ากับผลบวกของกำลังสองของอีกสองด้าน ให้นำมาบวกกันแล้วถอดรากที่สอง",
}


def checked(query: str, answer: str, value: str = "") -> CriterionResult:
    return check(Language(id="language", value=value), Exchange(query, answer))


@for_each("code", QUESTIONS)
def test_an_answer_in_the_language_of_the_question_passes_in_any_pair(code: str) -> None:
    assert checked(QUESTIONS[code], ANSWERS[code]).passed
    assert checked("?", ANSWERS[code], code).passed


@for_each(("asked", "spoken"), list(itertools.permutations(QUESTIONS, 2)))
def test_an_answer_in_another_language_is_found(asked: str, spoken: str) -> None:
    for query, value in ((QUESTIONS[asked], ""), ("?", asked)):
        result = checked(query, ANSWERS[spoken], value)
        assert not result.passed, result.reason
        assert "not in" in result.reason


SHORT = [
    "Yes.",
    "42",
    "Paris",
    r"\boxed{7}",
    "x = 38",
    "Angela Merkel",
    "北京",
    "OK",
    "",
    "🙂🙂🙂",
    "C'est la vie",
    "H₂SO₄",
]


@for_each("answer", SHORT)
@for_each("code", ["en", "de", "zh", "ar"])
def test_a_short_answer_is_no_false_alarm(code: str, answer: str) -> None:
    assert checked(QUESTIONS[code], answer).passed


MIXED = {
    "code with english words": ("de", "So geht es:\n```python\nfor item in collection:\n    print(item, end='')\n```\n"),
    "only code": ("ru", "```python\nimport os\nfor name in os.listdir('.'):\n    print(name)\nreturn the_result\n```"),
    "only formulas": ("zh", r"$a^2 + b^2 = c^2$, \[ c = \sqrt{a^2 + b^2} \text{ where } c \text{ is the hypotenuse} \]"),
    "a table of names": ("fr", "| name | value |\n|---|---|\n| longest side | c |\n| shortest side of all of them | a |"),
    "an english quotation": ("de", "Er sagte: “The square of the hypotenuse is the sum of the squares of the legs.” "
                             "Das heißt, man addiert die Quadrate der beiden kurzen Seiten."),
    "english before": ("zh", "The theorem says that a squared plus b squared is c squared. " + ANSWERS["zh"]),
    "english after": ("es", ANSWERS["es"] + " In English: the square of the longest side is the sum of the other squares."),
    "links": ("ja", "https://en.wikipedia.org/wiki/Pythagorean_theorem と https://example.org/longest-side を見てください。"),
    "names of a country": ("en", "Österreich, Deutschland, Schweiz"),
    "product names": ("de", "Microsoft Visual Studio Code, Google Chrome, Adobe Photoshop Elements, Apple Final Cut Pro"),
    "a list of numbers": ("ar", "1. 34\n2. 56\n3. 78\n4. 99\n" * 5),
}  # fmt: skip


@for_each("name", MIXED)
def test_a_mixed_answer_is_no_false_alarm(name: str) -> None:
    code, answer = MIXED[name]
    result = checked(QUESTIONS[code], answer)
    assert result.passed, result.reason


@for_each(
    ("query", "answer"),
    [
        ("Please translate into French: The square of the longest side.", ANSWERS["fr"]),
        ("Wie sagt man das auf Spanisch: Das Quadrat der längsten Seite ist die Summe?", ANSWERS["es"]),
        ("请把这句话翻译成英文：最长边的平方等于另外两条边的平方之和。", ANSWERS["en"]),
        ("Переведи на английский: квадрат самой длинной стороны равен сумме.", ANSWERS["en"]),
        ("Traduis en allemand : le carré du plus grand côté est la somme des carrés.", ANSWERS["de"]),
        ("42", ANSWERS["de"]),
        ("ok?", ANSWERS["ru"]),
        ("```\nTraceback (most recent call last): ValueError: not enough values\n```", ANSWERS["de"]),
        ("SELECT name FROM users;", ANSWERS["pl"]),
    ],
)
def test_a_question_that_leaves_the_language_open_is_no_alarm(query: str, answer: str) -> None:
    result = checked(query, answer)
    assert result.passed, result.reason


@for_each(
    ("asked", "spoken"),
    [
        ("Hvad er hovedstaden i Danmark, og hvor mange mennesker bor der i byen i dag?",
         "Hovedstaden er København. Der bor omkring seks hundrede tusind mennesker i byen."),
        ("Hva er hovedstaden i Norge, og hvor mange mennesker bor det i byen i dag?",
         "Hovedstaden er Oslo. Det bor omkring sju hundre tusen mennesker i byen i dag."),
        ("Koji je glavni grad Hrvatske i koliko ljudi danas živi u tom gradu?",
         "Glavni grad Hrvatske je Zagreb. U njemu danas živi oko osam stotina tisuća ljudi."),
        ("Яка столиця України і скільки людей живе в цьому місті сьогодні?",
         "Столиця України — Київ. У місті живе близько трьох мільйонів людей."),
        ("Qual é a capital de Portugal e quantas pessoas vivem hoje nessa cidade?",
         "A capital de Portugal é Lisboa. Vivem na cidade cerca de quinhentas mil pessoas."),
        ("Apa ibu kota Indonesia dan berapa banyak orang yang tinggal di kota itu?",
         "Ibu kota Indonesia adalah Jakarta. Sekitar sepuluh juta orang tinggal di kota itu."),
    ],
)  # fmt: skip
def test_languages_that_are_alike_are_not_taken_for_each_other(asked: str, spoken: str) -> None:
    result = checked(asked, spoken)
    assert result.passed, result.reason


FOREIGN = {
    "FRENCH", "GREEK", "PORTUGUESE", "VIETNAMESE", "RUSSIAN", "CHINESE", "LAO_TZU", "JAPANESE", "KOREAN", "ARABIC",
    "HEBREW", "HINDI", "THAI", "TAMIL", "ICELANDIC",
}  # fmt: skip


@for_each("name", [name for name in LEGITIMATE if name not in FOREIGN])
def test_strange_answers_to_an_english_question_are_no_false_alarm(name: str) -> None:
    result = checked(QUESTIONS["en"], LEGITIMATE[name])
    assert result.passed, result.reason


@for_each("value", ["de", "German", "german", "de-AT", "deutsch"])
def test_a_language_can_be_named_in_several_ways(value: str) -> None:
    assert checked("?", ANSWERS["de"], value).passed
    assert not checked("?", ANSWERS["fr"], value).passed
