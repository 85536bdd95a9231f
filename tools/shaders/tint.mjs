// node tint.mjs FOLDER FILE: compiles the texts in FILE with the Dawn in FOLDER/node_modules, and prints for each a line
// with its messages. Both are arrays of strings, in JSON.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';

const [folder, file] = process.argv.slice(2);
const { create, globals } = createRequire(`${folder}/`)('webgpu');
Object.assign(globalThis, globals);

const gpu = create(['backend=null']);
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: [...adapter.features] });
for (const code of JSON.parse(readFileSync(file, 'utf8'))) {
  device.pushErrorScope('validation');
  const module = device.createShaderModule({ code });
  const { messages } = await module.getCompilationInfo();
  const said = messages.map((m) => `${m.lineNum}:${m.linePos}: ${m.type}: ${m.message}`);
  const error = await device.popErrorScope();
  if (error && !said.length) said.push(error.message);
  console.log(JSON.stringify(said));
}
device.destroy();
process.exit(0);
