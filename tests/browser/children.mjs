// Programs that this one starts, each in a process group of its own. No group outlives this program.
import { spawn } from 'node:child_process';

const groups = new Set();

/** Starts a program. `child.gone` gives the reason when it has ended. */
export function start(program, args, options) {
  const child = spawn(program, args, { detached: true, ...options });
  groups.add(child);
  child.gone = new Promise((done) => {
    child.on('error', (e) => done(e.message));
    child.on('close', (code, signal) => done(`it ended by itself, ${signal ?? code}`));
  });
  child.gone.then(() => groups.delete(child));
  return child;
}

/** Kills the program and all that it has started. */
export function end(child) {
  try { process.kill(-child.pid, 'SIGKILL'); } catch { /* it has ended */ }
  return child.gone;
}

process.on('exit', () => groups.forEach(end));
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.on(signal, () => process.exit(1));
