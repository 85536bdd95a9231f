// node dawn.mjs FOLDER [WORD...]: the program in FOLDER/program on Dawn, the package `webgpu` in FOLDER/dawn; lines of
// JSON on standard output.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { cases } from './cases.mjs';

const [folder, ...words] = process.argv.slice(2);
const { create, globals } = await import(pathToFileURL(createRequire(`${folder}/dawn/`).resolve('webgpu')));
Object.assign(globalThis, globals);
Object.defineProperty(globalThis, 'navigator', { value: { gpu: create(['backend=vulkan']) } });
globalThis.Window = Object; // wgpu asks for the navigator only where there are windows

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`);
// After the panic's own message, if there is one.
const shown = (e) => setTimeout(() => { say({ broken: e.message ?? String(e) }); process.exit(1); }, 100);
process.on('uncaughtException', shown);
process.on('unhandledRejection', shown);
const program = await import(pathToFileURL(`${folder}/program/browser.js`));
await program.default({ module_or_path: readFileSync(`${folder}/program/browser_bg.wasm`) });
await cases(program, words, say);
process.exit(0);
