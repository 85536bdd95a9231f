// The page: handles the user's input and shows results.
import initialise, * as program from './program/browser.js';
import { download, read, sizeAt } from './files.mjs';
import { draw, mapOf, pointing } from './maps.mjs';

const SENTENCES = [
  'A cat sits on the mat.',
  'The kitten is resting on a rug.',
  'Attention weights the values by how well each key matches the query.',
  'Compute shaders run on the graphics processor, one workgroup at a time.',
  'It rained all day in the valley.',
  'Yes',
];
const WEIGHTS = 'model/model.safetensors';
const TOKENIZER = 'model/tokenizer.json';
/** The longest sentence, in tokens, for which the table shows every row. */
const TABLE = 48;

const ui = Object.fromEntries([...document.querySelectorAll('[id]')].map((element) => [element.id, element]));

/** The page's state. `results` has each sentence's text, tokens, weights [layers, heads, n, n] and vector. */
export const state = { loaded: null, busy: false, usable: false, lost: false, results: [], similarity: [], pair: [0, 0], head: 0 };
let layers = 0;
let heads = 0;

const say = (text) => { ui.status.textContent = text; };
const trouble = (text) => { ui.trouble.textContent = text; };

function enable() {
  const idle = state.usable && !state.busy;
  ui['from-server'].disabled = !idle;
  ui.weights.disabled = ui.tokenizer.disabled = !idle;
  ui['from-files'].disabled = !idle || !ui.weights.files.length || !ui.tokenizer.files.length;
  ui.run.disabled = !idle || !state.loaded || ui.sentences.value.trim() === '';
}

/** Stops the page for good, with a message. */
function end(text) {
  state.usable = false;
  trouble(text);
  say('Stopped.');
  enable();
}

globalThis.panicked = (message) => end(`The program failed: ${message}. Reload the page.`);
globalThis.deviceLost = (message) => {
  state.lost = true;
  end(`The browser has taken the GPU away${message ? `: ${message.replace(/\.$/, '')}` : ''}. Reload the page to continue.`);
};

/** Runs one task at a time, and shows its error. */
async function busy(work) {
  if (state.busy) return;
  state.busy = true;
  trouble('');
  // A disabled button loses the keyboard's focus: restore it after the work.
  const focused = document.activeElement;
  enable();
  try {
    await work();
  } catch (e) {
    if (state.usable) {
      trouble(e.message ?? String(e));
      say('That did not work.');
    }
  } finally {
    state.busy = false;
    ui.progress.hidden = true;
    enable();
    if (document.activeElement === document.body) focused?.focus();
  }
}

const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/** Loads the model from two sources, each with a `size` and `bytes(progress)`. */
async function load(name, weights, tokenizer) {
  const size = weights.size + tokenizer.size;
  let before = 0;
  let told = -1;
  ui.progress.value = 0;
  ui.progress.hidden = false;
  const progress = (at) => {
    const share = size > 0 ? Math.min((before + at) / size, 1) : 0;
    ui.progress.value = share;
    // Announce only every tenth to screen readers.
    const tenth = Math.floor(10 * share);
    if (tenth > told) {
      told = tenth;
      say(`Loading: ${megabytes(before + at)} of ${megabytes(size)}`);
    }
  };
  const tokens = await tokenizer.bytes(progress);
  before = tokens.length;
  const model = await weights.bytes(progress);
  ui.progress.value = 1;
  say('Copying the weights to the GPU …');
  const loaded = await program.load(name, model, tokens);
  state.loaded?.unload();
  state.loaded = loaded;
  if (!state.usable) return;
  say('The model is ready.');
}

async function run() {
  const texts = ui.sentences.value.split('\n').map((line) => line.trim()).filter(Boolean);
  const results = [];
  ui.progress.value = 0;
  ui.progress.hidden = false;
  for (const [at, text] of texts.entries()) {
    say(`Sentence ${at + 1} of ${texts.length} …`);
    const sentence = await state.loaded.run(text);
    const { tokens, weights, vector } = sentence;
    sentence.free();
    results.push({ text, tokens, weights, vector, n: tokens.length });
    ui.progress.value = (at + 1) / texts.length;
  }
  const vectors = new Float32Array(results.flatMap(({ vector }) => [...vector]));
  Object.assign(state, { results, similarity: program.similarity(vectors), pair: [0, 0], head: 0 });
  show();
  say(`${texts.length} ${texts.length === 1 ? 'sentence' : 'sentences'} computed; attention and similarity are below.`);
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  return made;
}

const options = (select, names) => select.replaceChildren(...names.map((name, n) => element('option', name, { value: n })));
const chosen = () => state.results[ui.sentence.value];

function show() {
  options(ui.sentence, state.results.map(({ text }, n) => `${n + 1}. ${text.length > 60 ? `${text.slice(0, 59)}…` : text}`));
  ui.results.hidden = false;
  similarity();
  maps();
}

/** Creates the heads' maps, once. */
function places() {
  options(ui.layer, Array.from({ length: layers }, (_, n) => `${n + 1} of ${layers}`));
  ui.layer.value = layers - 1;
  options(ui.head, Array.from({ length: heads }, (_, n) => `${n + 1}`));
  ui.heads.replaceChildren(...Array.from({ length: heads }, (_, head) => {
    const figure = element('figure');
    // The map handles arrow keys, also if a screen reader would use them.
    const canvas = element('canvas', undefined, {
      tabindex: 0, role: 'application', 'aria-roledescription': 'attention map', 'aria-label': `Head ${head + 1}`,
      'aria-describedby': 'how pair',
    });
    figure.append(canvas, element('figcaption', `Head ${head + 1}`));
    pointing(canvas, () => ({ n: chosen().n, pair: state.pair }), (pair) => {
      const [before, old] = [state.head, state.pair];
      if (before === head && old[0] === pair[0] && old[1] === pair[1] && ui.pair.textContent) return;
      Object.assign(state, { head, pair });
      if (before !== head) map(before);
      map(head);
      told();
      ui.head.value = head;
      if (ui.details.open && (before !== head || chosen().n > TABLE)) table();
    });
    return figure;
  }));
}

function map(head) {
  const sentence = chosen();
  const weights = mapOf(sentence, heads, Number(ui.layer.value), head);
  draw(ui.heads.children[head].firstChild, weights, sentence.n, head === state.head ? state.pair : null);
}

function maps() {
  for (let head = 0; head < heads; head++) map(head);
  told();
  if (ui.details.open) table();
}

/** Shows the weight of the selected pair. */
function told() {
  const sentence = chosen();
  const [query, key] = state.pair;
  const layer = Number(ui.layer.value);
  const weight = mapOf(sentence, heads, layer, state.head)[query * sentence.n + key];
  ui.pair.value = `Layer ${layer + 1}, head ${state.head + 1}: “${sentence.tokens[query]}” (${query + 1}) looks at `
    + `“${sentence.tokens[key]}” (${key + 1}) with ${weight.toFixed(4)}`;
}

function table() {
  const sentence = chosen();
  const { tokens, n } = sentence;
  const weights = mapOf(sentence, heads, Number(ui.layer.value), state.head);
  const rows = n <= TABLE ? tokens.map((_, row) => row) : [state.pair[0]];
  const caption = `Layer ${Number(ui.layer.value) + 1}, head ${state.head + 1}: queries as rows, keys as columns`
    + `${n <= TABLE ? '' : '; for a sentence this long, only the row that the map points at'}`;
  fill(ui.table, caption, tokens, rows.map((row) => [tokens[row], weights.subarray(row * n, (row + 1) * n)]));
}

/** Fills a table. Each of `rows` is a name and its numbers. */
function fill(table, caption, columns, rows, strong = () => false) {
  const head = element('tr');
  head.append(element('td'), ...columns.map((name) => element('th', name, { scope: 'col' })));
  table.replaceChildren(element('caption', caption), head, ...rows.map(([name, numbers]) => {
    const row = element('tr');
    const cells = [...numbers].map((x) => element('td', x.toFixed(3), strong(x) ? { class: 'strong' } : {}));
    row.append(element('th', name, { scope: 'row' }), ...cells);
    return row;
  }));
}

function similarity() {
  const n = state.results.length;
  const rows = state.results.map(({ text }, row) => [`${row + 1}. ${text}`, state.similarity.subarray(row * n, (row + 1) * n)]);
  const caption = 'The cosine between sentences: 1 is the same direction; values from 0.5 are marked';
  fill(ui.similarity, caption, rows.map((_, n) => n + 1), rows, (x) => x >= 0.5);
}

/** The reason why WebGPU is not usable; empty if it is. */
async function missing() {
  if (!isSecureContext) return 'Browsers allow WebGPU only over https or from this computer: open the page as http://127.0.0.1 or http://localhost.';
  if (!navigator.gpu) {
    return 'This browser has no WebGPU, which the page needs. Chrome and Edge have it since version 113, Safari since 26, Firefox since 141 '
      + 'on Windows; on Linux you may have to turn it on.';
  }
  const adapter = await navigator.gpu.requestAdapter().catch(() => null);
  return adapter ? '' : 'This browser has WebGPU but finds no GPU that it may use. Graphics acceleration may be off in its settings, or it may '
    + 'block this driver (see chrome://gpu).';
}

const source = (url, size) => ({ size, bytes: (progress) => download(url, progress) });
const picked = (input) => ({ size: input.files[0].size, bytes: (progress) => read(input.files[0], progress) });

async function start() {
  ui.sentences.value = SENTENCES.join('\n');
  const why = await missing();
  if (why) return end(why);
  await initialise();
  let longest;
  [layers, heads, longest] = program.sizes();
  places();
  const [weights, tokenizer] = await Promise.all([sizeAt(WEIGHTS), sizeAt(TOKENIZER)]);
  const served = weights !== null && tokenizer !== null;
  ui.server.hidden = !served;
  ui['no-server'].hidden = served;
  if (served) {
    ui['from-server'].textContent = `Load from this server, ${megabytes(weights + tokenizer)}`;
    ui['from-server'].addEventListener('click', () => busy(() => load(WEIGHTS, source(WEIGHTS, weights), source(TOKENIZER, tokenizer))));
  }
  ui['from-files'].addEventListener('click', () => busy(() => load(ui.weights.files[0].name, picked(ui.weights), picked(ui.tokenizer))));
  [ui.weights, ui.tokenizer].forEach((input) => input.addEventListener('change', enable));
  ui.sentences.addEventListener('input', enable);
  ui.run.addEventListener('click', () => busy(run));
  ui.sentence.addEventListener('change', () => { state.pair = [0, 0]; maps(); });
  ui.layer.addEventListener('change', maps);
  ui.head.addEventListener('change', () => {
    const before = state.head;
    state.head = Number(ui.head.value);
    [before, state.head].forEach(map);
    told();
    table();
  });
  ui.details.addEventListener('toggle', () => { if (ui.details.open) table(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { if (state.results.length) maps(); });
  state.usable = true;
  say(`Load the model first. Sentences can have up to ${longest} tokens.`);
  enable();
}

start().catch((e) => end(`The page could not start: ${e.message ?? e}`));
