// The official Anthropic client for JavaScript: messages, whole and streamed.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const api = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ask = { model, messages: [{ role: "user", content: "Name a tree." }], max_tokens: 12, temperature: 0 };
const whole = await api.messages.create(ask);
const final = await api.messages.stream(ask).finalMessage();
assert.equal(final.content[0].text, whole.content[0].text);
assert.ok(whole.usage.input_tokens > 0);
console.log("messages, streams");
