// node test.mjs PROGRAM FOLDER BROWSER=COMMAND...: tests the page in each browser, and compares its numbers with stored results of
// transformers. Writes pictures to FOLDER. The exit status is 1 if any check fails.
//
//   chromium=PROGRAM   Chromium, headless, on SwiftShader
//   firefox=RUNNER     Firefox, headless, started through RUNNER (which provides the root of its packages)
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { inflateSync } from 'node:zlib';
import { HEIGHT, WIDTH, started } from './browsers.mjs';
import { modelFolder, serve } from './serve.mjs';

const [folder, out, ...browsers] = process.argv.slice(2);
const STORED = fileURLToPath(new URL('../embed/data/encoder_minilm_default.safetensors', import.meta.url));
/** The same as in examples/embed. */
const TOLERANCE = 1e-5;
/** The tolerance of a number shown with three digits. */
const THREE = 5e-4 + TOLERANCE;
const [LAYERS, HEADS] = [6, 12];

/** Reads the f32 and f64 tensors of a safetensors file. */
function tensors(path) {
  const file = readFileSync(path);
  const start = 8 + Number(file.readBigUInt64LE(0));
  const header = JSON.parse(file.subarray(8, start));
  const numbers = { F32: [4, 'readFloatLE'], F64: [8, 'readDoubleLE'] };
  return (name) => {
    const { dtype, shape, data_offsets: [from, to] } = header[name];
    const [size, get] = numbers[dtype];
    const data = file.subarray(start + from, start + to);
    return { shape, data: Array.from({ length: data.length / size }, (_, n) => data[get](n * size)) };
  };
}

/** Decodes a PNG of 8 bits without interlacing, as browsers write it. Source: W3C, "Portable Network Graphics", sections 5 and 9. */
function decoded(png) {
  const [width, height] = [png.readUInt32BE(16), png.readUInt32BE(20)];
  const channels = { 2: 3, 6: 4 }[png[25]];
  if (png[24] !== 8 || !channels || png[28] !== 0) throw new Error('a PNG of another kind');
  const parts = [];
  for (let at = 8; at < png.length;) {
    const size = png.readUInt32BE(at);
    if (png.toString('latin1', at + 4, at + 8) === 'IDAT') parts.push(png.subarray(at + 8, at + 8 + size));
    at += 12 + size;
  }
  const data = inflateSync(Buffer.concat(parts));
  const row = width * channels;
  const pixels = Buffer.alloc(row * height);
  for (let y = 0; y < height; y++) {
    const filter = data[y * (row + 1)];
    for (let x = 0; x < row; x++) {
      const at = y * row + x;
      const left = x < channels ? 0 : pixels[at - channels];
      const up = y === 0 ? 0 : pixels[at - row];
      const corner = y === 0 || x < channels ? 0 : pixels[at - row - channels];
      const [p, q, r] = [Math.abs(up - corner), Math.abs(left - corner), Math.abs(left + up - 2 * corner)];
      const paeth = p <= q && p <= r ? left : q <= r ? up : corner;
      pixels[at] = data[y * (row + 1) + 1 + x] + [0, left, up, (left + up) >> 1, paeth][filter];
    }
  }
  return { width, height, at: (x, y) => [...pixels.subarray((y * width + x) * channels).subarray(0, 3)] };
}

let failures = 0;
const check = (what, good, seen = '') => {
  if (!good) failures += 1;
  console.log(`${good ? 'ok    ' : 'FAILED'}  ${what}${seen === '' ? '' : `: ${seen}`}`);
};

/** Returns the largest difference; infinite if a value is no number or the lengths differ. */
const difference = (got, want) => got.length !== want.length ? Infinity
  : got.reduce((worst, x, n) => Number.isNaN(x - want[n]) || x === null ? Infinity : Math.max(worst, Math.abs(x - want[n])), 0);
const close = (what, got, want, tolerance) => {
  const worst = difference(got, want);
  check(what, worst <= tolerance, `${worst.toExponential(1)} at most of ${want.length}, allowed ${tolerance.toExponential(0)}`);
};

/** Checks a screenshot: the page's background colour, and maps with several shades. */
async function look(browser, name, scheme) {
  await browser.scheme(scheme);
  await browser.evaluate(`document.getElementById('heads').scrollIntoView({ block: 'center' });
    new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))`);
  const bytes = await browser.picture();
  writeFileSync(join(out, name), bytes);
  const picture = decoded(bytes);
  check(`${name}: size`, picture.width === WIDTH && picture.height === HEIGHT, `${picture.width} x ${picture.height}`);
  const background = await browser.evaluate('getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)');
  check(`${name}: the page is ${scheme}`, (background[0] < 128) === (scheme === 'dark'), background);
  const around = [[3, 3], [WIDTH - 30, 3], [3, HEIGHT - 4]].map(([x, y]) => picture.at(x, y));
  check(`${name}: around is the page's background`, around.every((pixel) => difference(pixel, background) <= 2), around.join(' '));
  const boxes = await browser.evaluate(`[...document.querySelectorAll('#heads canvas')].map((canvas) => {
    const { left, top, right, bottom } = canvas.getBoundingClientRect(); return [left, top, right, bottom].map(Math.round); })`);
  const seen = boxes.filter(([left, top, right, bottom]) => left >= 0 && top >= 0 && right <= WIDTH && bottom <= HEIGHT);
  check(`${name}: maps in the picture`, seen.length === HEADS, seen.length);
  const spreads = seen.map(([left, top, right, bottom]) => {
    let [low, high, kinds] = [255, 0, new Set()];
    for (let y = top + 4; y < bottom - 4; y += 2) {
      for (let x = left + 4; x < right - 4; x += 2) {
        const pixel = picture.at(x, y);
        low = Math.min(low, pixel[1]);
        high = Math.max(high, pixel[1]);
        kinds.add(pixel.join());
      }
    }
    return { spread: high - low, kinds: kinds.size };
  });
  const [spread, kinds] = ['spread', 'kinds'].map((key) => Math.min(...spreads.map((map) => map[key])));
  check(`${name}: every map has shades`, spread >= 40 && kinds >= 16, `${spread} of green, ${kinds} colours at least`);
}

async function test(browser, url) {
  // The page explains why it cannot run.
  for (const [what, script, pattern] of [
    ['without WebGPU', 'delete Navigator.prototype.gpu', /^This browser has no WebGPU/],
    ['without an adapter', 'if (globalThis.GPU) GPU.prototype.requestAdapter = async () => null', /finds no GPU/],
  ]) {
    await browser.open(url, script);
    const text = await browser.until('trouble', pattern, 30);
    const off = await browser.evaluate(`[...document.querySelectorAll('button')].every((button) => button.disabled)`);
    check(`${what}: it is said, and nothing can be started`, off, text.split(/[.,:]/)[0]);
  }

  await browser.open(url);
  await browser.until('status', /^Load the model first/, 60);
  // Use the keyboard alone.
  const stops = [];
  const tab = async () => {
    await browser.key('Tab');
    stops.push(await browser.evaluate(`document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.tagName`));
  };
  for (let n = 0; n < 4; n++) await tab();
  check('the order of focus before', stops.join() === 'from-server,weights,tokenizer,sentences', stops.join(' '));
  await browser.evaluate(`globalThis.shares = [];
    new MutationObserver(() => shares.push(document.getElementById('progress').value))
      .observe(document.getElementById('progress'), { attributes: true });
    document.getElementById('from-server').focus()`);
  await browser.key('Enter');
  await browser.until('status', /^The model is ready/);
  const shares = await browser.evaluate('shares');
  check('progress grows to the end', shares.length > 10 && shares.at(-1) === 1 && shares.every((x, n) => n < 2 || x >= shares[n - 1]),
    `${shares.length} steps`);
  check('progress is gone after it', await browser.evaluate(`!document.getElementById('progress').checkVisibility()`));
  await browser.evaluate(`document.getElementById('run').focus()`);
  await browser.key('Enter');
  await browser.until('status', /^6 sentences computed/);

  // Compare numbers.
  const stored = tensors(STORED);
  const state = await browser.evaluate(`import('./page.mjs').then(({ state }) => ({ similarity: [...state.similarity],
    results: state.results.map(({ text, tokens, n, vector, weights }) => ({ text, tokens, n, vector: [...vector], weights: [...weights] })) }))`);
  const { shape: [heads, n], data: truth } = stored('l5.weights');
  const sentence = state.results[2];
  check('tokens of the third sentence', sentence.n === n && heads === HEADS, sentence.tokens.join(' '));
  close('embeddings', state.results.flatMap(({ vector }) => vector), stored('embedding').data, TOLERANCE);
  close('similarity', state.similarity, stored('similarity').data, TOLERANCE);
  close('weights of the last layer', sentence.weights.slice((LAYERS - 1) * HEADS * n * n), truth, TOLERANCE);
  const sums = state.results.flatMap(({ weights, n: size }) => Array.from({ length: weights.length / size }, (_, row) =>
    weights.slice(row * size, (row + 1) * size).reduce((a, b) => a + b)));
  close('rows of all maps sum to 1', sums, sums.map(() => 1), TOLERANCE);

  // Compare the shown numbers, to three digits.
  const cells = (id) => browser.evaluate(`[...document.querySelectorAll('#${id} td')].map((cell) => cell.textContent).filter(Boolean).map(Number)`);
  close('similarity as shown', await cells('similarity'), stored('similarity').data, THREE);
  const choose = (id, value) => browser.evaluate(`{ const it = document.getElementById('${id}'); it.value = '${value}';
    it.dispatchEvent(new Event('change')); }`);
  await choose('sentence', 2);
  await choose('layer', LAYERS - 1);
  await browser.evaluate(`document.getElementById('details').open = true`);
  await choose('head', 4);
  close('the table of a head as shown', await cells('table'), truth.slice(4 * n * n, 5 * n * n), THREE);
  await browser.evaluate(`document.getElementById('details').open = false; document.getElementById('layer').focus()`);
  stops.length = 0;
  for (let at = 0; at < HEADS + 1; at++) await tab();
  const want = [...Array.from({ length: HEADS }, (_, head) => `Head ${head + 1}`), 'SUMMARY'];
  check('the order of focus after', stops.join() === want.join(), stops.join(', '));
  await browser.evaluate(`document.querySelectorAll('#heads canvas')[7].focus()`);
  for (const key of ['Home', 'ArrowDown', 'ArrowDown', 'ArrowRight', 'ArrowRight', 'ArrowRight']) await browser.key(key);
  const pair = await browser.text('pair');
  const weight = Number(pair.match(/with (\S+)$/)?.[1]);
  check('arrow keys reach a pair', /^Layer 6, head 8: .* \(3\) looks at .* \(4\) with/.test(pair), pair);
  close('the weight of the pair as shown', [weight], [truth[7 * n * n + 2 * n + 3]], 5e-5 + TOLERANCE);
  // Use the pointer.
  const [x, y] = await browser.evaluate(`(() => { const { left, top, width, height } = document.querySelectorAll('#heads canvas')[1]
    .getBoundingClientRect(); return [left + width * 5.5 / ${n}, top + height * 1.5 / ${n}]; })()`);
  await browser.point(x, y);
  const pointed = await browser.until('pair', /head 2:/, 10);
  check('the pointer reaches a pair', /\(2\) looks at .* \(6\) with/.test(pointed), pointed);

  // Check names for screen readers.
  const named = await browser.focusable();
  const without = named.filter(({ name }) => !name);
  check('what takes the focus has a name', named.length > HEADS && without.length === 0,
    `${named.length} things${without.map(({ role }) => `; a ${role} has none`).join('')}`);

  await look(browser, `${browser.name}-light.png`, 'light');
  await look(browser, `${browser.name}-dark.png`, 'dark');

  // Choose files: first invalid ones.
  const pick = (id, file) => browser.pick(id, file);
  const model = modelFolder();
  const press = () => browser.evaluate(`document.getElementById('from-files').click()`);
  await pick('tokenizer', join(model, 'tokenizer.json'));
  const usable = () => browser.evaluate(`!document.getElementById('run').disabled && !document.getElementById('from-files').disabled`);
  const part = (name, bytes) => {
    writeFileSync(join(browser.data, name), bytes);
    return join(browser.data, name);
  };
  const whole = readFileSync(join(model, 'model.safetensors'));
  for (const [what, weights, tokenizer, pattern] of [
    ['a file that is no model', join(model, 'tokenizer.json'), '', /^tokenizer\.json is not a valid safetensors file: /],
    ['an empty file', part('empty.safetensors', ''), '', /^empty\.safetensors is not a valid safetensors file: /],
    ['a file that is cut off', part('cut.safetensors', whole.subarray(0, whole.length - 1)), '', /^cut\.safetensors is not a valid safetensors file: .*the download is complete/],
    ['another model', STORED, '', /^no tensor `encoder\.layer\.0\.attention\.self\.query\.weight` in encoder_minilm_default\.safetensors/],
    ['a tokenizer that is none', STORED, part('none.json', '{}'), /^tokenizer\.json is unusable: /],
    ['a tokenizer that is cut off', STORED, part('cut.json', readFileSync(join(model, 'tokenizer.json')).subarray(0, 1000)), /^tokenizer\.json is unusable: /],
  ]) {
    await pick('tokenizer', tokenizer || join(model, 'tokenizer.json'));
    await pick('weights', weights);
    await press();
    const refusal = await browser.until('trouble', pattern, 60);
    await browser.until('status', /^That did not work/, 10);
    check(`${what} is refused, and nothing is lost`, await usable(), refusal);
  }
  // Simulate a server that fails after it has announced the size.
  for (const [what, response, pattern] of [
    ['a connection that breaks', `new Response('12345', { headers: { 'content-length': '9' } })`, /^5 of 9 bytes came: the connection broke/],
    ['a server that has the file no more', `new Response('', { status: 404 })`, /^the server answers 404 for model\/tokenizer\.json/],
    ['no network', `Promise.reject(new TypeError('Failed to fetch'))`, /^the server does not answer for model\/tokenizer\.json: Failed to fetch/],
  ]) {
    await browser.evaluate(`globalThis.kept ??= fetch; globalThis.fetch = async () => ${response}; document.getElementById('from-server').click()`);
    const refusal = await browser.until('trouble', pattern, 60);
    await browser.until('status', /^That did not work/, 10);
    check(`${what} is said, and nothing is lost`, await usable(), refusal);
  }
  await browser.evaluate(`{ globalThis.fetch = kept; const it = document.getElementById('sentences'); it.value = ' \\n '; it.dispatchEvent(new Event('input')); }`);
  check('without a sentence nothing is run', await browser.evaluate(`document.getElementById('run').disabled`));
  await pick('tokenizer', join(model, 'tokenizer.json'));
  await pick('weights', join(model, 'model.safetensors'));
  await press();
  await browser.until('status', /^The model is ready/);
  // Run the same sentence twice, and one that is too long.
  await browser.evaluate(`{ const it = document.getElementById('sentences'); it.value = '\\nYes\\n\\n Yes \\n' + 'word '.repeat(300);
    it.dispatchEvent(new Event('input')); } document.getElementById('run').click()`);
  await browser.until('status', /^3 sentences computed/);
  const three = await cells('similarity');
  close('from picked files: the same sentence twice', [0, 1, 3, 4].map((at) => three[at]), [1, 1, 1, 1], THREE);
  await choose('sentence', 2);
  await browser.evaluate(`document.getElementById('details').open = true`);
  await browser.until('table', /the row that the map points at/, 10);
  const row = await cells('table');
  const sum = row.reduce((a, b) => a + b, 0);
  check('of 300 words 256 tokens, of which the table shows a row', row.length === 256 && Math.abs(sum - 1) < 256 * THREE, `${row.length}, ${sum.toFixed(3)} in all`);

  // Lose the device.
  if (browser.lose) {
    browser.lose();
    const lost = await browser.until('trouble', /has taken the GPU away/, 60);
    check('a lost device is said', await browser.evaluate(`document.getElementById('run').disabled`), lost);
  } else {
    console.log('skipped: a lost device is said: nothing takes the GPU away from this browser');
  }
  check('no exception was left over', browser.console.length === 0, browser.console.join('; '));
}

if (!existsSync(join(modelFolder(), 'model.safetensors'))) {
  console.log(`skipped: no weights in ${modelFolder()}: \`cargo run --release -p embed\` fetches them`);
  process.exit(0);
}
mkdirSync(out, { recursive: true });
const server = await serve(folder, 0);
for (const argument of browsers) {
  const at = argument.indexOf('=');
  console.log(`== ${argument.slice(0, at)}`);
  const start = Date.now();
  let browser;
  try {
    browser = await started(argument.slice(0, at), argument.slice(at + 1), dirname(folder));
    await test(browser, `http://127.0.0.1:${server.address().port}/`);
  } catch (e) {
    check('the test ends', false, e.message);
  }
  await browser?.close();
  console.log(`== ${Math.round((Date.now() - start) / 1000)} s`);
}
server.close();
server.closeAllConnections();
console.log(failures === 0 ? `all as it should be; pictures in ${out}` : `${failures} of the checks failed`);
process.exit(failures === 0 ? 0 : 1);
