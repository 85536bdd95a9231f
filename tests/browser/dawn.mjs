// node dawn.mjs FOLDER [WORD...]: the program in FOLDER/program, or the doctor of FOLDER/doctor if the first word is
// --doctor, on Dawn, the package `webgpu` in FOLDER/dawn; lines of JSON on standard output.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { cases } from './cases.mjs';
import { doctor } from './doctor.mjs';

const [folder, ...words] = process.argv.slice(2);
const dawn = createRequire(`${folder}/dawn/`);
const { create, globals } = await import(pathToFileURL(dawn.resolve('webgpu')));
Object.assign(globalThis, globals);
Object.defineProperty(globalThis, 'navigator', { value: { gpu: create(['backend=vulkan']) } });
globalThis.Window = Object; // wgpu asks for the navigator only where there are windows

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
// After the panic's own message, if there is one.
const shown = (e) => setTimeout(() => { say({ broken: e.message ?? String(e) }); process.exit(1); }, 100);
process.on('uncaughtException', shown);
process.on('unhandledRejection', shown);
const asked = words[0] === '--doctor';
const files = `${folder}/${asked ? 'doctor' : 'program'}`;
const program = await import(pathToFileURL(`${files}/browser.js`));
await program.default({ module_or_path: readFileSync(`${files}/browser_bg.wasm`) });
if (asked) {
  const driver = `Dawn of webgpu ${dawn('webgpu/package.json').version} in Node ${process.versions.node}`;
  await doctor(program, driver, words.includes('--quick'), say);
} else {
  await cases(program, words, say);
}
process.exit(0);
