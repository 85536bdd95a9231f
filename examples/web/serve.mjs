// node serve.mjs PROGRAM [PORT]: serves the page and the program in the folder PROGRAM on 127.0.0.1.
// Also serves the weights, if `cargo run --release -p embed` has downloaded them.
import { createReadStream, existsSync, statSync } from 'node:fs';
import { createServer } from 'node:http';
import { homedir } from 'node:os';
import { join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';

const TYPES = { html: 'text/html; charset=utf-8', css: 'text/css', mjs: 'text/javascript', js: 'text/javascript',
  wasm: 'application/wasm', json: 'application/json', safetensors: 'application/octet-stream' };
const here = (file) => fileURLToPath(new URL(file, import.meta.url));

/** Returns the folder in which tools/minilm stores the model. */
export function modelFolder() {
  const { WGPU_ATTENTION_CACHE, XDG_CACHE_HOME, LOCALAPPDATA } = process.env;
  const caches = { darwin: join(homedir(), 'Library/Caches'), win32: LOCALAPPDATA }[process.platform]
    ?? (XDG_CACHE_HOME || join(homedir(), '.cache'));
  return join(WGPU_ATTENTION_CACHE ? resolve(WGPU_ATTENTION_CACHE) : join(caches, 'wgpu-attention'), 'all-MiniLM-L6-v2');
}

/** Serves on `port`; 0 means any free port. */
export async function serve(program, port) {
  const model = modelFolder();
  const files = new Map([
    ['/', here('index.html')],
    ...['style.css', 'page.mjs', 'maps.mjs', 'files.mjs'].map((name) => [`/${name}`, here(name)]),
    ...['browser.js', 'browser_bg.wasm'].map((name) => [`/program/${name}`, join(program, name)]),
    ...['model.safetensors', 'tokenizer.json'].map((name) => [`/model/${name}`, join(model, name)]),
  ]);
  const server = createServer((request, response) => {
    const file = files.get(request.url.split('?')[0]);
    if (!['GET', 'HEAD'].includes(request.method)) return response.writeHead(405, { allow: 'GET, HEAD' }).end();
    if (!file || !existsSync(file)) return response.writeHead(404).end();
    response.writeHead(200, { 'content-type': TYPES[file.split('.').pop()], 'content-length': statSync(file).size,
      'cache-control': 'no-cache' });
    if (request.method === 'HEAD') return response.end();
    createReadStream(file).on('error', () => response.destroy()).pipe(response);
  });
  await new Promise((done, failed) => server.on('error', failed).listen(port, '127.0.0.1', done));
  return server;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const [program, port = '8080'] = process.argv.slice(2);
  try {
    const server = await serve(program, Number(port));
    console.log(`http://127.0.0.1:${server.address().port}/`);
    const model = modelFolder();
    console.log(existsSync(join(model, 'model.safetensors')) ? `weights of ${model}`
      : `no weights in ${model}: \`cargo run --release -p embed\` fetches them, or the page takes files`);
  } catch (e) {
    console.error(e.code === 'EADDRINUSE' ? `port ${port} is taken: choose another with --port` : e.message);
    process.exit(1);
  }
}
