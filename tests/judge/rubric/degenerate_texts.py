"""Answers that no person would want: loops of many kinds, tool calls that became text, broken encoding."""

from __future__ import annotations

OPENING = "To solve this we first look at what is given. "
SENTENCE = "The answer is that the answer depends on the answer. "
PARAGRAPH = (
    "First we need to understand the question, which asks for the sum of the two numbers that were given above. "
    "Then we add the two numbers, and we check that the sum is what we expect it to be. "
)

LOOPS: dict[str, str] = {
    "one word": OPENING + "the " * 200,
    "one word with commas": OPENING + "really, " * 60,
    "two words": OPENING + "very good " * 60,
    "a sentence": OPENING + SENTENCE * 12,
    "a paragraph": OPENING + PARAGRAPH * 6,
    "a paragraph, cut off": OPENING + (PARAGRAPH * 6)[:-77],
    "long paragraphs": OPENING + (PARAGRAPH + "So we do it again. " + PARAGRAPH.replace("sum", "product")) * 4,
    "a line": OPENING + "\n" + "I am sorry, I cannot do this.\n" * 15,
    "two lines in turn": OPENING + "\n" + "Wait, let me check that again.\nYes, that is right.\n" * 12,
    "three lines in turn": "Hm.\nLet me think about it for a moment.\nNo, that is not it.\n" * 15,
    "lines with a number": "\n".join(f"{n}. Make sure that the answer is right and complete." for n in range(1, 40)),
    "steps with a number": "\n".join(f"Step {n}: We check whether the last result is right." for n in range(1, 30)),
    "one letter": "The answer is a" + "a" * 300,
    "an exclamation mark": "Great" + "!" * 900,
    "a digit": "0." + "3" * 900,
    "zeros with commas": "[" + "0, " * 600,
    "a syllable": "ha" * 200,
    "characters without spaces": "abcabd" * 60,
    "in the middle": OPENING + SENTENCE * 15 + "And so the result is four, which is what was asked for. Good luck!",
    "after a right answer": "The answer is \\boxed{7}. " + "I hope this helps! " * 30,
    "boxed again and again": "The final answer is \\boxed{7}. " * 20,
    "chinese": "答案是七。" * 40,
    "chinese word": "我们需要" * 50,
    "chinese with opening": "首先，我们来看题目给出的条件。" + "因为所以" * 60,
    "japanese": "ありがとうございます。" * 30,
    "korean": "감사합니다 " * 60,
    "thai": "ขอบคุณครับ" * 50,
    "russian": "Ответ зависит от ответа. " * 20,
    "arabic": "الجواب هو الجواب. " * 25,
    "hindi": "उत्तर यही है। " * 30,
    "greek": "Η απάντηση είναι η απάντηση. " * 20,
    "emoji": "Well done 🎉🎊 " * 40,
    "latex": OPENING + "$x = y$ and so we have that " * 25,
    "in code": "```python\n" + "x = x + 1\n" * 120,
    "in closed code": "```python\n" + "print('hello world')\n" * 200 + "```",
    "an import": "```\n" + "import numpy as np\n" * 150,
    "a json list": "```json\n[" + '{"id": 1, "name": "x"}, ' * 120,
    "a url": "See https://example.org/" + "a/b/" * 200,
    "html": "<div><div>" * 100,
    "a long unit of tokens": (" ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(150)) + " ") * 4,
    "many lines": ("\n".join(f"Point {chr(97 + n)} says something of its own here." for n in range(20)) + "\n") * 5,
    "nothing new": " ".join(
        f"so the {a} is {b} and the {b} is {a}" for _ in range(9) for a in ("sum", "part") for b in ("whole", "half")
    ),
    "blank lines between": "\n\n".join(["I will now answer the question that was asked."] * 14),
    "windows line ends": "\r\n".join(["I will now answer the question that was asked."] * 14),
    "mixed case": "Yes yes YES " * 40,
    "a list item": "- Drink enough water every day\n" * 20,
    "a heading": "## Introduction\n\n" * 30,
    "user and assistant": "User: What is it?\nAssistant: I do not know.\n" * 15,
}  # fmt: skip

TOOL_TEXTS: dict[str, str] = {
    "an open tag": 'I will look it up. <tool_call>\n{"name": "search", "arguments": {"q": "x"}}',
    "a closing tag": 'search("x")</tool_call>',
    "a function tag": '<function=search>{"q": "x"}</function>',
    "mistral": '[TOOL_CALLS][{"name": "search", "arguments": {}}]',
    "llama": '<|python_tag|>search.call(query="x")',
    "deepseek": "<｜tool▁calls▁begin｜>search",
    "an invocation": '<function_calls>\n<invoke name="search">',
    "bare json": '{"name": "get_weather", "arguments": {"city": "Oslo"}}',
    "broken json": '{"name": "get_weather", "arguments": {"city": "Oslo"',
    "single quotes": "{'name': 'get_weather', 'arguments': {'city': 'Oslo'}}",
    "a list of calls": '[{"name": "add", "parameters": {"a": 1, "b": 2}}]',
    "openai form": '{"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}',
    "a template word": "The answer is 4.<|im_end|>",
    "the next turn": "The answer is 4.\n<|im_start|>user\nThanks",
    "a turn of gemma": "It is 4.<end_of_turn>",
    "end of text": "It is 4.<|endoftext|>Human: what is it?",
    "byte tokens": "It is <0xF0><0x9F> 4.",
    "instruction": "It is 4. [/INST] And then",
}

BROKEN: dict[str, str] = {
    "replacement characters": "Die L\ufffdsung ist f\ufffdnf, nat\ufffdrlich.",
    "decoded twice": "Die LÃ¶sung fÃ¼r das RÃ¤tsel ist fÃ¼nf.",
    "quotes decoded twice": "Itâ€™s â€œfineâ€\u009d, donâ€™t worry.",
    "cyrillic decoded twice": "ÐŸÑ€Ð¸Ð²ÐµÑ‚",
    "chinese decoded twice": "ä½ å¥½ï¼Œä¸–ç•Œ".encode("cp1252", "ignore").decode("latin-1"),
    "control characters": "The\x00 answer\x01 is\x02 4.",
    "half of a character": "The answer is \ud83d 4.",
}
