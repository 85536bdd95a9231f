// node pageless.mjs FOLDER [WORD...], or deno run pageless.mjs FOLDER [WORD...]: the program in FOLDER/program, or the
// doctor of FOLDER/doctor if the first word is --doctor; lines of JSON on standard output. Deno has a WebGPU; Node gets
// Dawn, the package `webgpu` in FOLDER/dawn.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { cases } from './cases.mjs';
import { doctor } from './doctor.mjs';

const [folder, ...words] = process.argv.slice(2);

/** Gives this runtime its WebGPU, and returns what to call it. */
async function prepare() {
  if (globalThis.Deno) return `Deno ${Deno.version.deno}`;
  const dawn = createRequire(`${folder}/dawn/`);
  const { create, globals } = await import(pathToFileURL(dawn.resolve('webgpu')));
  Object.assign(globalThis, globals);
  Object.defineProperty(globalThis, 'navigator', { value: { gpu: create(['backend=vulkan']) } });
  return `Dawn of webgpu ${dawn('webgpu/package.json').version} in Node ${process.versions.node}`;
}

const driver = await prepare();
globalThis.Window ??= Object; // wgpu asks for the navigator only where there are windows

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
// After the panic's own message, if there is one.
const shown = (e) => setTimeout(() => { say({ broken: e.message ?? String(e) }); process.exit(1); }, 100);
process.on('uncaughtException', shown);
process.on('unhandledRejection', shown);
const asked = words[0] === '--doctor';
const files = `${folder}/${asked ? 'doctor' : 'program'}`;
const program = await import(pathToFileURL(`${files}/browser.js`));
await program.default({ module_or_path: readFileSync(`${files}/browser_bg.wasm`) });
if (asked) await doctor(program, driver, words.includes('--quick'), say);
else await cases(program, words, say);
process.exit(0);
