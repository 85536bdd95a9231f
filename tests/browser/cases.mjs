// Runs the cases of the program whose names have one of `words`, or all, in turn, in a page or in Node; a word like 1/2
// leaves every second of them. `say` gets an object for each. A panic or a case without end ends the program: those after it are not run.

const SECONDS = 150;

export const SHARE = /^[1-9]\d*\/[1-9]\d*$/;

export async function cases({ begin, run }, words, say) {
  let fail = () => {};
  // The program calls it; the promise that it was about to settle never will be.
  globalThis.panicked = (message) => fail(message);
  const within = (promise) => new Promise((good, bad) => {
    fail = (why) => bad(new Error(why));
    const timer = setTimeout(() => fail(`no end after ${SECONDS} s`), SECONDS * 1000);
    promise.then(good, (e) => fail(e?.message ?? String(e))).finally(() => clearTimeout(timer));
  });
  try {
    const { info } = await navigator.gpu.requestAdapter() ?? {};
    const adapter = info && ([info.vendor, info.architecture, info.description].filter(Boolean).join(' ') || 'not named');
    const [f16, ...names] = await within(begin());
    const all = names.map((name, n) => ({ name, n }));
    const [share, shares] = words.find((word) => SHARE.test(word))?.split('/').map(Number) ?? [1, 1];
    const parts = words.filter((word) => !SHARE.test(word));
    const chosen = all.filter(({ name }) => parts.length === 0 || parts.some((word) => name.includes(word)))
      .filter((_, place) => place % shares === share - 1);
    await say({ adapter, f16: f16 === 'true', names: chosen.map(({ name }) => name) });
    for (const [at, { n }] of chosen.entries()) {
      const [outcome, why] = await within(run(n));
      await say({ at, outcome, why });
    }
    await say({ end: true });
  } catch (e) {
    await say({ broken: e.message });
  }
}
