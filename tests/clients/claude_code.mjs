// Claude Code: one prompt over messages.
import { spawnSync } from "node:child_process";
import { mkdtempSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, model] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "claude-"));
const env = {
  ...process.env, HOME: home, ANTHROPIC_BASE_URL: url, ANTHROPIC_AUTH_TOKEN: "none", ANTHROPIC_MODEL: model,
  ANTHROPIC_SMALL_FAST_MODEL: model, CLAUDE_CODE_MAX_OUTPUT_TOKENS: "1024", DISABLE_TELEMETRY: "1",
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
};
const done = spawnSync("claude", ["-p", "Say hello.", "--tools", "", "--system-prompt", "Be brief."], {
  env, cwd: home, timeout: 600_000, input: "",
});
if (done.status !== 0 || !done.stdout.toString().trim()) throw new Error(`no answer: ${done.stderr.toString().slice(-600) || done.stdout}`);
console.log("one prompt");
