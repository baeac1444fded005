"""A program without tracing: `python chat.py "What is 12 times 34?" "And twice that?"`.

It only speaks to the alias of `flywheel serve`. The server's call log is all that Flywheel needs.
"""

import sys

from openai import OpenAI

# OPENAI_BASE_URL=http://127.0.0.1:8000/v1 is `flywheel serve`, and my-agent the alias.
client = OpenAI(api_key="unused")
messages = [{"role": "system", "content": "You are a calculator."}]
for question in sys.argv[1:]:
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model="my-agent", messages=messages).choices[0].message.content
    messages.append({"role": "assistant", "content": answer})
    print(answer)
