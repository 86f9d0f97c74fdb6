// OpenCode: one prompt over chats.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, model] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "opencode-"));
const limit = { context: 8192, output: 64 };
const provider = { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${url}/v1`, apiKey: "none" }, models: { [model]: { limit } } };
const config = join(home, "opencode.json");
// Its own instructions and tools are longer than a small model's context.
const agent = { build: { prompt: "Be brief.", tools: { "*": false } } };
writeFileSync(config, JSON.stringify({ provider: { ramet: provider }, agent, autoupdate: false }));
const done = spawnSync("opencode", ["run", "--model", `ramet/${model}`, "Say hello."], {
  env: { ...process.env, HOME: home, XDG_CONFIG_HOME: home, XDG_DATA_HOME: home, PWD: home, OPENCODE_CONFIG: config, OPENCODE_DISABLE_MODELS_FETCH: "1" }, cwd: home, timeout: 600_000, input: "",
});
if (done.status !== 0 || !done.stdout.toString().trim()) throw new Error(`no answer: ${done.stderr.toString().slice(-600) || done.stdout}`);
console.log("one prompt");
