// node run.mjs FOLDER RUNTIME=COMMAND... [WORD...]: the program in FOLDER/program in each runtime, two at a time, and a
// table of the results; with words only the cases with one of them in their names. With a share, as 1/2, the first
// runtime runs this one, and each other runtime the share after it.
//
//   chromium=PROGRAM   Chromium, headless, on SwiftShader
//   node=RUNNER        Node on Dawn, started through RUNNER (which brings a Vulkan driver) if it is not empty
//   firefox=RUNNER     Firefox, headless, started through RUNNER (which brings its packages' root)
//   deno=RUNNER        FOLDER/deno, started as Node is
//
// With --doctor as the first word, the doctor in FOLDER/doctor instead: the page of each runtime, and --quick for one
// without times.
//
// Exit status 1 unless every case passed or was skipped in every runtime, or every page has its end.
import { mkdtempSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { SHARE } from './cases.mjs';
import { end, start } from './children.mjs';
import { startFirefox } from './firefox.mjs';

const [folder, ...rest] = process.argv.slice(2);
const runtimes = rest.filter((word) => /^(chromium|node|firefox|deno)=/.test(word));
const words = rest.filter((word) => !runtimes.includes(word));
const here = (file) => fileURLToPath(new URL(file, import.meta.url));
const LIMIT = 900; // seconds for all cases of a runtime
const AT_A_TIME = 2; // runtimes: each computes on all cores
const asked = words[0] === '--doctor';

/** `words` for the n-th runtime. */
function wordsOf(n) {
  return words.map((word) => {
    if (!SHARE.test(word)) return word;
    const [share, shares] = word.split('/').map(Number);
    return `${(share - 1 + n) % shares + 1}/${shares}`;
  });
}

const FLAGS = ['--headless', '--no-sandbox', '--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader',
  '--disable-gpu-watchdog', '--disable-background-networking', '--disable-component-update', '--disable-sync',
  '--no-first-run', '--disable-dev-shm-usage'];

/** What a runtime has said so far. */
class Run {
  constructor(runtime, words) {
    Object.assign(this, { runtime, words, adapter: '', f16: false, names: [], outcomes: [], page: '', log: '' });
    this.over = new Promise((done) => { this.end = done; });
  }

  hear(line) {
    if (line.names) Object.assign(this, line);
    if (line.text) this.page += line.text;
    if (line.at !== undefined) this.outcomes[line.at] = line;
    if (line.broken && !this.broken) this.broken = line.broken;
    if (line.broken || line.end) this.end();
  }

  /** What is to be said of every case. */
  results() {
    const why = (n) => n === this.outcomes.length && this.broken ? this.broken : 'not run';
    const rest = (n) => this.outcomes[n] ?? { outcome: 'failed', why: why(n) };
    return this.names.map((name, n) => ({ name, ...rest(n) }));
  }
}

/** Until the runtime has said its last line, but not for longer than the limit; then ends it. */
async function within(run, child) {
  let timer;
  child.stderr.on('data', (text) => { run.log = (run.log + text).slice(-4000); });
  const late = new Promise((done) => { timer = setTimeout(done, LIMIT * 1000, `no end after ${LIMIT} s`); });
  const why = await Promise.race([run.over, child.gone, late]);
  if (why) run.broken ??= why;
  clearTimeout(timer);
  await end(child);
}

/** Serves the page, and `use(url)` opens it. */
async function served(run, use) {
  const types = { html: 'text/html', mjs: 'text/javascript', js: 'text/javascript', wasm: 'application/wasm' };
  const files = new Map([['/', here('page.html')], ['/cases.mjs', here('cases.mjs')], ['/doctor.mjs', here('doctor.mjs')],
    ...['program', 'doctor'].flatMap((name) => [`/${name}/browser.js`, `/${name}/browser_bg.wasm`])
      .map((path) => [path, join(folder, path)])]);
  const server = createServer(async (request, response) => {
    if (request.method === 'POST') {
      let body = '';
      for await (const part of request) body += part;
      run.hear(JSON.parse(body));
      return response.end();
    }
    const file = files.get(request.url);
    if (!file) return response.writeHead(404).end();
    response.writeHead(200, { 'content-type': types[file.split('.').pop()] }).end(readFileSync(file));
  });
  await new Promise((done) => server.listen(0, '127.0.0.1', done));
  await use(`http://127.0.0.1:${server.address().port}/#${encodeURIComponent(JSON.stringify(run.words))}`);
  server.close();
  server.closeAllConnections();
}

function chromium(run, program) {
  return served(run, async (url) => {
    const data = mkdtempSync(join(tmpdir(), 'browser-'));
    // Another driver's settings are not for its SwiftShader.
    const { VK_DRIVER_FILES, VK_ICD_FILENAMES, ...env } = process.env;
    const child = start(program, [...FLAGS, `--user-data-dir=${data}`, '--remote-debugging-port=0', url],
      { stdio: ['ignore', 'ignore', 'pipe'], env });
    await within(run, child);
    rmSync(data, { recursive: true, force: true, maxRetries: 3 });
  });
}

function firefox(run, runner) {
  return served(run, async (url) => {
    const { child } = startFirefox(runner, folder, [url], { stdio: ['ignore', 'ignore', 'pipe'] });
    await within(run, child);
  });
}

/** A runtime without pages. */
async function pageless(run, command, env = {}) {
  const [program, ...args] = [...command, here('pageless.mjs'), folder, ...run.words].filter(Boolean);
  const child = start(program, args, { stdio: ['ignore', 'pipe', 'pipe'], env: { ...process.env, ...env } });
  let rest = '';
  child.stdout.on('data', (text) => {
    const lines = (rest + text).split('\n');
    rest = lines.pop();
    lines.forEach((line) => run.hear(JSON.parse(line)));
  });
  await within(run, child);
}

const node = (run, runner) => pageless(run, [runner, process.execPath]);
const deno = (run, runner) => pageless(run, [runner, realpathSync(join(folder, 'deno')), 'run', '-A', '--unstable-webgpu', '--no-config',
  '--no-lock', '--no-remote', '--no-npm'], { DENO_DIR: join(folder, 'deno-cache'), DENO_NO_UPDATE_CHECK: '1' });

const kinds = { chromium, node, firefox, deno };
const result = async (argument) => {
  const at = argument.indexOf('=');
  const run = new Run(argument.slice(0, at), wordsOf(runtimes.indexOf(argument)));
  const started = Date.now();
  await kinds[run.runtime](run, argument.slice(at + 1));
  run.seconds = Math.round((Date.now() - started) / 1000);
  return run;
};
if (asked) {
  let ended = runtimes.length > 0;
  // In turn: each is timed.
  for (const [n, argument] of runtimes.entries()) {
    const { runtime, page, broken, log } = await result(argument);
    process.stdout.write((n > 0 ? '\n' : '') + page);
    if (broken) console.error(`${runtime}: failed: ${broken}\n${log}`);
    ended &&= !broken;
  }
  process.exit(ended ? 0 : 1);
}
const runs = [];
const waiting = [...runtimes.entries()];
const next = async () => {
  for (let one = waiting.shift(); one; one = waiting.shift()) runs[one[0]] = await result(one[1]);
};
await Promise.all(Array.from({ length: AT_A_TIME }, next));
const table = [['runtime', 'adapter', 'f16', 'cases', 'passed', 'skipped', 'failed', 'seconds']];
let good = runs.length > 0;
for (const run of runs) {
  const { runtime, seconds } = run;
  const results = run.results();
  for (const { name, outcome, why } of results) {
    if (outcome !== 'passed') console.log(`${runtime}: ${outcome}: ${name}: ${why}`);
  }
  const count = (kind) => results.filter(({ outcome }) => outcome === kind).length;
  const [passed, skipped] = [count('passed'), count('skipped')];
  const failed = results.length === 0 ? 'all' : results.length - passed - skipped;
  if (run.broken) console.log(`${runtime}: failed: ${run.broken}\n${run.log}`);
  good &&= !run.broken && failed === 0 && passed > 0;
  table.push([runtime, run.adapter, run.f16 ? 'yes' : 'no', results.length, passed, skipped, failed, seconds]);
}
const widths = table[0].map((_, n) => Math.max(...table.map((row) => String(row[n]).length)));
for (const row of table) console.log(row.map((cell, n) => String(cell).padEnd(widths[n])).join('  ').trimEnd());
process.exit(good ? 0 : 1);
