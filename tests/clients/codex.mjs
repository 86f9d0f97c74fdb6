// Codex: one prompt over responses.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

const [url, model] = process.argv.slice(2);
const home = mkdtempSync(join(tmpdir(), "codex-"));
writeFileSync(join(home, "brief.md"), "Be brief."); // its own instructions and tools need more context and sense than a small model has
writeFileSync(join(home, "config.toml"), `model = "${model}"
model_provider = "ramet"
model_context_window = 8192
model_instructions_file = "${join(home, "brief.md")}"
[features]
goals = false
multi_agent = false
shell_tool = false
view_image = false
[model_providers.ramet]
name = "Ramet"
base_url = "${url}/v1"
wire_api = "responses"
`);
const done = spawnSync("codex", ["exec", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello."], {
  env: { ...process.env, CODEX_HOME: home }, cwd: home, timeout: 600_000, input: "",
});
if (done.status !== 0 || !done.stdout.toString().trim()) throw new Error(`no answer: ${done.stderr.toString().slice(-600) || done.stdout}`);
console.log("one prompt");
