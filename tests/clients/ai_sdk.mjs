// Vercel's AI SDK: its default provider (responses), its provider of chats, and the OpenAI-compatible one.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "ramet", baseURL: `${url}/v1`, includeUsage: true });
const options = { prompt: "Name a tree.", maxOutputTokens: 40, temperature: 0, maxRetries: 0 };
for (const one of [openai(model), openai.chat(model), compatible(model)]) {
  const whole = await generateText({ model: one, ...options });
  assert.ok(whole.text);
  const stream = streamText({ model: one, ...options, onError: ({ error }) => { throw error; } });
  assert.equal(await stream.text, whole.text);
  assert.ok((await stream.usage).outputTokens > 0);
}
// A call, its result, and the answer after it, whose items are references to stored ones.
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => `15 C in ${city}`,
});
const called = await generateText({
  model: openai(model), ...options, prompt: "The weather in Rome?", tools: { weather },
  stopWhen: stepCountIs(2), prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" }),
});
assert.equal(called.steps.length, 2);
assert.equal(called.steps[0].toolResults.length, 1);
console.log("responses with calls, chats, the compatible provider");
