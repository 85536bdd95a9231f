// Firefox without a window, with a new profile that is removed at the end of this program.
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { start } from './children.mjs';

const PROGRAM = '/usr/lib/firefox-esr/firefox-esr';

/** WebGPU is on, for software drivers too. Background connections and first-run pages are off. */
const PREFERENCES = {
  'dom.webgpu.enabled': true,
  'gfx.webgpu.ignore-blocklist': true,
  'gfx.webgpu.force-enabled': true,
  // Firefox can reach only this machine.
  'network.proxy.type': 1,
  'network.proxy.http': '127.0.0.1',
  'network.proxy.http_port': 9,
  'network.proxy.ssl': '127.0.0.1',
  'network.proxy.ssl_port': 9,
  'network.proxy.no_proxies_on': '127.0.0.1',
  'network.proxy.allow_bypass': false,
  'network.proxy.failover_direct': false,
  'network.captive-portal-service.enabled': false,
  'network.connectivity-service.enabled': false,
  'network.dns.disablePrefetch': true,
  'network.prefetch-next': false,
  'network.http.speculative-parallel-limit': 0,
  'services.settings.server': 'data:,',
  'app.update.auto': false,
  'app.update.enabled': false,
  'app.normandy.enabled': false,
  'nimbus.rollouts.enabled': false,
  'extensions.update.enabled': false,
  'extensions.getAddons.cache.enabled': false,
  'extensions.systemAddon.update.enabled': false,
  'browser.safebrowsing.malware.enabled': false,
  'browser.safebrowsing.phishing.enabled': false,
  'browser.safebrowsing.downloads.enabled': false,
  'browser.safebrowsing.update.enabled': false,
  'browser.region.update.enabled': false,
  'browser.search.update': false,
  'browser.topsites.contile.enabled': false,
  'browser.newtabpage.enabled': false,
  'browser.newtabpage.activity-stream.feeds.system.topstories': false,
  'geo.enabled': false,
  'media.gmp-manager.updateEnabled': false,
  'datareporting.healthreport.uploadEnabled': false,
  'datareporting.policy.dataSubmissionEnabled': false,
  'datareporting.usage.uploadEnabled': false,
  'toolkit.telemetry.enabled': false,
  'toolkit.telemetry.unified': false,
  'toolkit.telemetry.server': 'data:,',
  // No page or question opens at the start.
  'browser.startup.page': 0,
  'browser.startup.homepage_override.mstone': 'ignore',
  'browser.aboutwelcome.enabled': false,
  'browser.shell.checkDefaultBrowser': false,
  'browser.sessionstore.resume_from_crash': false,
  'startup.homepage_welcome_url': '',
  'trailhead.firstrun.didSeeAboutWelcome': true,
  'termsofuse.bypassNotification': true,
  // A script may compute for minutes.
  'dom.max_script_run_time': 0,
  'dom.ipc.processPrelaunch.enabled': false,
};

/** Starts Firefox through `runner`, with a profile in a new folder in `parent`, which the runner's root has, too. */
export function startFirefox(runner, parent, args, options) {
  const profile = mkdtempSync(join(parent, 'firefox-'));
  process.on('exit', () => rmSync(profile, { recursive: true, force: true, maxRetries: 3 }));
  const lines = Object.entries(PREFERENCES).map(([name, value]) => `user_pref(${JSON.stringify(name)}, ${JSON.stringify(value)});\n`);
  writeFileSync(join(profile, 'user.js'), lines.join(''));
  // The second lets the preference name the server of settings.
  const env = { ...process.env, MOZ_CRASHREPORTER_DISABLE: '1', MOZ_REMOTE_SETTINGS_DEVTOOLS: '1' };
  const child = start(runner, [PROGRAM, '--headless', '--no-remote', '--profile', profile, ...args], { ...options, env });
  return { child, profile };
}
