"""Answers that are right and repeat themselves, or look strange: none of them is degenerate."""

from __future__ import annotations

POEM = """\
Row, row, row your boat,
Gently down the stream.
Merrily, merrily, merrily, merrily,
Life is but a dream.

Row, row, row your boat,
Gently down the stream.
Merrily, merrily, merrily, merrily,
Life is but a dream."""
RAVEN = "\n\n".join(
    f"{verse}\n    Quoth the raven, Nevermore."
    for verse in (
        "Be that word our sign of parting, bird or fiend, I shrieked, upstarting;",
        "And the raven, never flitting, still is sitting, still is sitting;",
        "Prophet, said I, thing of evil, prophet still, if bird or devil;",
        "Much I marvelled this ungainly fowl to hear discourse so plainly;",
        "Open here I flung the shutter, when, with many a flirt and flutter;",
        "Then this ebony bird beguiling my sad fancy into smiling;",
    )
)
BOTTLES = "\n\n".join(
    f"{n} bottles of beer on the wall, {n} bottles of beer.\n"
    f"Take one down and pass it around, {n - 1} bottles of beer on the wall."
    for n in range(9, 0, -1)
)
OLD_LADY = "\n".join(
    f"There was an old lady who swallowed a {animal}; {why}"
    for animal, why in (
        ("fly", "I don't know why she swallowed a fly. Perhaps she'll die."),
        ("spider", "it wriggled and jiggled and tickled inside her. She swallowed the spider to catch the fly."),
        ("bird", "how absurd to swallow a bird! She swallowed the bird to catch the spider."),
        ("cat", "imagine that, to swallow a cat! She swallowed the cat to catch the bird."),
        ("dog", "what a hog, to swallow a dog! She swallowed the dog to catch the cat."),
        ("cow", "I don't know how she swallowed a cow! She swallowed the cow to catch the dog."),
    )
)
LOG = "\n".join(f"2026-03-01 12:{n:02d}:00,{n:03d} INFO worker[12] heartbeat ok, queue=0" for n in range(60))
SAME_LOG = "```\n" + "connection refused, retrying in 5 s\n" * 30 + "connected\n```\nThe server was down for a while."
TABLE = "| n | n² | even |\n|---|---|---|\n" + "\n".join(
    f"| {n} | {n * n} | {'yes' if n % 2 == 0 else 'no'} |" for n in range(80)
)
ZERO_TABLE = "| a | b | c | d |\n|---|---|---|---|\n" + "| 0 | 0 | 0 | 0 |\n" * 40
WIDE_RULE = "| " + " | ".join("x" for _ in range(12)) + " |\n|" + "---|" * 12 + "\n" + "=" * 120 + "\n" + "-" * 120
MATRIX = (
    r"$$\begin{pmatrix}" + r" \\ ".join(" & ".join("0" for _ in range(12)) for _ in range(12)) + r"\end{pmatrix}$$"
)
ZEROS = "The vector is [" + ", ".join(["0"] * 100) + "]."
GOOGOL = "A googol is 1" + "0" * 100 + "."
THIRD = "1/3 = 0." + "3" * 120 + "…"
BINARY = "```\n" + "\n".join(f"{n:08x}  " + "00 " * 16 + " |................|" for n in range(0, 1024, 16)) + "\n```"
BASE64 = "The key is AAAAB3NzaC1yc2EAAAADAQABAAABgQC" + "A" * 20 + "7vbqajDRz0fSFGJZ5hM8AAAAAAAAAAAA end."
CODE = """Here is the class:

```python
class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Point(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
        return Point(self.x - other.x, self.y - other.y)

    def __mul__(self, factor):
        return Point(self.x * factor, self.y * factor)
```

Then `Point(1, 2) + Point(3, 4)` is `Point(4, 6)`."""
TESTS = "```python\n" + "\n".join(
    f"def test_{name}():\n    assert parse({name!r}) == {name!r}\n"
    for name in ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
) + "```"  # fmt: skip
HTML = "```html\n<ul>\n" + "  <li></li>\n" * 20 + "</ul>\n```"
LIST = "\n".join(f"{n}. Item {n}" for n in range(1, 101))
STEPS = "\n".join(
    f"{n}. {text}"
    for n, text in enumerate(
        (
            "Open the settings and choose the network that you use.",
            "Open the settings and choose the printer that you use.",
            "Restart the computer, then wait for a minute.",
            "Restart the printer, then wait for a minute.",
            "Print a test page and look at the colours.",
            "If the colours are wrong, clean the heads and print a test page again.",
        ),
        1,
    )
)
TIMES = "\n".join(f"{a} × {b} = {a * b}" for a in range(1, 11) for b in range(1, 11))
SUBTASKS = "- [ ] to do\n" * 12
LAUGH = "Ha ha ha ha ha ha! " + "😂" * 30 + " That is a good one. " + "!" * 20
CHANT = "Om mani padme hum, om mani padme hum, om mani padme hum. Repeat it as often as you like."
BUFFALO = "Buffalo buffalo Buffalo buffalo buffalo buffalo Buffalo buffalo is a correct sentence."
BLANKS = "\n".join(f"{n}. ______________________________________________" for n in range(1, 11))
CONTENTS = "\n".join(f"{n}. Chapter {n} {'.' * 60} {n * 12}" for n in range(1, 20))
FRENCH = (
    "L’été dernier, nous sommes allés à la plage. « Ça va ? » demanda-t-elle. Noël, cœur, naïf, où, déjà : "
    "les accents sont bien là. Le château, l’hôtel, la forêt et l’île sont à côté."
)
GREEK = (
    "Το θεώρημα του Πυθαγόρα λέει ότι το τετράγωνο της υποτείνουσας ισούται με το άθροισμα των τετραγώνων. "
    "Άρα α² + β² = γ². Η απάντηση είναι πέντε."
)
PORTUGUESE = "NÃO É ASSIM: A AÇÃO DA FUNÇÃO NÃO MUDA. SÃO PAULO FICA NO BRASIL. À NOITE, MANHÃ E AMANHÃ, IRMÃ E MAÇÃ."
VIETNAMESE = "Thủ đô của Việt Nam là Hà Nội. Đây là một thành phố rất đẹp với nhiều hồ và cây xanh. ĐÃ XONG, ÂM NHẠC."
RUSSIAN = "Столица России — Москва. Это самый большой город страны, и он стоит на реке Москве. Ответ: Москва."
CHINESE = (
    "勾股定理说明：直角三角形斜边的平方等于两条直角边的平方之和。因此，三的平方加四的平方等于五的平方。答案是五。"
)
LAO_TZU = "道可道，非常道；名可名，非常名。无，名天地之始；有，名万物之母。故常无，欲以观其妙；常有，欲以观其徼。"
JAPANESE = "東京は日本の首都です。人口はおよそ千四百万人です。すもももももももものうち。"
KOREAN = "대한민국의 수도는 서울입니다. 한강이 도시를 가로질러 흐릅니다. 간장 공장 공장장은 강 공장장이다."
ARABIC = "عاصمة مصر هي القاهرة، وهي أكبر مدينة في العالم العربي. يمر بها نهر النيل من الجنوب إلى الشمال."
HEBREW = "בירת ישראל היא ירושלים. העיר בנויה על הרים, ויש בה אתרים רבים."
HINDI = "भारत की राजधानी नई दिल्ली है। यह यमुना नदी के किनारे बसी है। धीरे-धीरे रे मना, धीरे सब कुछ होय।"
THAI = "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย เป็นเมืองที่ใหญ่ที่สุดและมีผู้คนอาศัยอยู่มากมาย ใครขายไข่ไก่"
TAMIL = "தமிழ்நாட்டின் தலைநகரம் சென்னை. இது ஒரு பெரிய நகரம்."
ICELANDIC = "Höfuðborg Íslands er Reykjavík. Þar búa um það bil tveir þriðju hlutar þjóðarinnar. Æðið er þar á öllu."
MIXED = (
    "In German one says „Guten Tag“, in Japanese こんにちは, in Russian Привет, in Greek Γεια σας, in Arabic مرحبا."
)
MATHS = (
    r"Let $a_n = \frac{1}{n}$. Then $\sum_{n=1}^{\infty} a_n = \infty$, whereas \[\sum_{n=1}^{\infty} a_n^2 = "
    r"\frac{\pi^2}{6}.\] So the answer is \boxed{\frac{\pi^2}{6}}."
)
DERIVATION = "\n".join(f"= {n} + {n + 1} + {n + 2}" for n in range(40))
BOX_ART = (
    "```\n┌──────────────────────────────┐\n│ hello                        │\n└──────────────────────────────┘\n```"
)
BARE_BOX = "┌" + "─" * 100 + "┐\n│" + " " * 100 + "│\n└" + "─" * 100 + "┘"
MERMAID = "```mermaid\ngraph TD\n" + "\n".join(f"  A{n} --> A{n + 1}" for n in range(60)) + "\n```"
JSON_ANSWER = '{"name": "Ada", "year": 1815, "fields": ["mathematics", "computing"]}'
JSON_ROWS = '{"rows": [' + ", ".join('{"a": 0, "b": null}' for _ in range(25)) + "]}"
CSV = "name,team,points\n" + "\n".join(f"player{n},red,0" for n in range(60))
ABOUT_TOOLS = (
    'Qwen writes a call as `<tool_call>{"name": "add", "arguments": {}}</tool_call>`, and a turn ends with '
    "`<|im_end|>`. For example:\n```\n<|im_start|>user\nHello<|im_end|>\n```\nLlama uses `<|eot_id|>` instead."
)
ABOUT_ENCODING = "The replacement character � stands for bytes that cannot be decoded; “Ã©” is an é, decoded twice."
ABOUT_MARKUP = "In HTML, <s>this</s> is struck through, <b>this</b> is bold, and a List<String> is a type in Java."
SHELL = "Run:\n\n    sudo apt-get update\n    sudo apt-get install -y git\n    git clone https://example.org/x.git\n"
DIFF = "```diff\n" + "\n".join(f"-    old_{n} = {n}\n+    new_{n} = {n}" for n in range(40)) + "\n```"
CONJUGATION = "\n".join(
    f"{who} {form}" for who, form in (("ich", "gehe"), ("du", "gehst"), ("er", "geht"), ("wir", "gehen"))
)  # fmt: skip
DIALOGUE = "\n".join(("A: Knock, knock.", "B: Who's there?") * 4) + "\nA: Lettuce.\nB: Lettuce who?"
LITANY = "\n".join(
    f"{saint}, pray for us." for saint in (
        "Saint Michael", "Saint Gabriel", "Saint Raphael", "Saint Peter", "Saint Paul", "Saint Andrew", "Saint James",
        "Saint John", "Saint Thomas", "Saint Philip", "Saint Matthew", "Saint Simon", "Saint Luke", "Saint Mark",
    )
)  # fmt: skip
YES_NO_LIST = "\n".join(
    f"- Number {n} is prime: {'yes' if n in (2, 3, 5, 7, 11, 13, 17, 19) else 'no'}" for n in range(1, 31)
)
CHORD = "G  D  Em C  |  G  D  C  C  |  G  D  Em C  |  G  D  C  C"
MANTRA = "I will not talk in class.\n" * 5
ANAPHORA = " ".join(
    f"We shall fight {where}." for where in (
        "in France", "on the seas and oceans", "with growing confidence and growing strength in the air",
        "on the beaches", "on the landing grounds", "in the fields and in the streets", "in the hills",
    )
)  # fmt: skip
DNA = "The sequence is CAGCAGCAGCAGCAGCAGCAGCAGCAGCAG, with ten repeats."
MORSE = "... --- ... / ... --- ... / ... --- ..."
FIBONACCI = ", ".join(str(n) for n in (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987))
ACTION_WORD = "Action: press the red button. Name: the stop button. It ends the programme at once."
LONG_WORD = "Aaaaaaaaaaargh! Nooooooooooooooo! The answer is sooooo simple: 4."
QUOTES = "> " + "\n> ".join(["To be, or not to be, that is the question:"] * 2)
YAML_ANSWER = "```yaml\n" + "\n".join(f"- name: node{n}\n  role: worker\n  state: ready" for n in range(30)) + "\n```"
HEARTBEATS = "\n".join(f"[{n:04d}] ping 10.0.0.1: ok, 64 bytes, ttl 64" for n in range(40))
LEGAL = "\n".join(
    f"({letter}) the party of the {order} part shall bear the costs of the party of the {order} part;"
    for letter, order in zip("abcdef", ("first", "second", "third", "fourth", "fifth", "sixth"), strict=True)
)
SCHEDULE = "\n".join(
    f"Day {n}: run {3 + n // 4} km at an easy pace, stretch for ten minutes, and drink a glass of water."
    for n in range(1, 8)
)
EMPTY = ""
SPACES = "a" + " " * 300 + "b" + "\n" * 200 + "c"

LEGITIMATE: dict[str, str] = {
    name: value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str)
}
