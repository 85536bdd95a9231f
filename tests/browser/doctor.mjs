// The doctor's page of this runtime, part by part to `say`. `driver`: what the runtime calls itself.

const SECONDS = 800;

export async function doctor({ doctor }, driver, quick, say) {
  try {
    const { info } = await navigator.gpu.requestAdapter() ?? {};
    const adapter = info ? [info.vendor, info.architecture].filter(Boolean).join(' ') || 'not named' : 'nothing';
    // In turn: what is printed is not waited for.
    let said = Promise.resolve();
    globalThis.printed = (text) => { said = said.then(() => say({ text })); };
    await new Promise((good, bad) => {
      globalThis.panicked = (why) => bad(new Error(why));
      setTimeout(() => bad(new Error(`no end after ${SECONDS} s`)), SECONDS * 1000);
      doctor(adapter, driver, quick).then(good, bad);
    });
    await said;
    await say({ end: true });
  } catch (e) {
    await say({ broken: e?.message ?? String(e) });
  }
}
