// The official `openai` client for JavaScript: chats and responses, whole and streamed.
import assert from "node:assert";
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "Name a tree." }], max_tokens: 12, temperature: 0 };
const whole = (await api.chat.completions.create(ask)).choices[0].message.content;
const parts = [];
for await (const chunk of await api.chat.completions.create({ ...ask, stream: true }))
  parts.push(chunk.choices[0]?.delta?.content ?? "");
assert.equal(parts.join(""), whole);
const asked = { model, input: "Name a tree.", max_output_tokens: 12, temperature: 0 };
const answer = await api.responses.create(asked);
const final = await api.responses.stream(asked).finalResponse();
assert.equal(final.output_text, answer.output_text);
assert.ok(answer.output_text);
console.log("chats, responses");
