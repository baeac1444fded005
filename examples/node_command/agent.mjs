// An agent with a tool in another language, as a command: rollout: {agent: {command: [node, agent.mjs]}}
//
// The task comes as JSON on standard input, the model's address in the environment. What is written to standard output
// is one JSON object; anything else goes to standard error. Node 18 or newer, and no packages.

import { text } from "node:stream/consumers";

const { OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL } = process.env;
const task = JSON.parse(await text(process.stdin));

const tools = { multiply: ({ a, b }) => String(a * b) };
const number = { type: "integer" };
const definitions = [
  {
    type: "function",
    function: {
      name: "multiply",
      description: "Multiply two whole numbers.",
      parameters: { type: "object", properties: { a: number, b: number }, required: ["a", "b"] },
    },
  },
];

async function ask(messages) {
  const response = await fetch(`${OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${OPENAI_API_KEY}` },
    body: JSON.stringify({ model: OPENAI_MODEL, messages, tools: definitions }),
  });
  if (!response.ok) throw new Error(`the model answered ${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

function answer(call) {
  try {
    return tools[call.function.name](JSON.parse(call.function.arguments));
  } catch (error) {
    return `Error: ${error.message}`; // a wrong call is the model's mistake: it may try again
  }
}

const messages = [
  { role: "system", content: "You are a calculator. Use your tools." },
  ...task.init_messages.filter(({ role }) => role !== "system"),
  { role: "user", content: task.main_query },
];
let calls = 0;
for (;;) {
  const message = await ask(messages);
  messages.push(message);
  if (!message.tool_calls?.length) break;
  for (const call of message.tool_calls) {
    messages.push({ role: "tool", tool_call_id: call.id, content: answer(call) });
    calls += 1;
  }
}
console.log(JSON.stringify({ response: messages.at(-1).content ?? "", metrics: { tool_calls: calls } }));
