//! Measures the highest rates of a device, with loops that do one thing each. The host chooses
//! their length.
//!
//! A compiler must not shorten the loops. Operands come from buffers, and every result is stored.
//! Results of short loops are compared with the host's, and twice the length must take twice the
//! time.

use std::fmt;
use std::time::Duration;

use half::f16;
use rows::Row;
use wgpu_attention::{Gpu, wgpu};

use super::copy::{Copy, CopyForm};
use super::device;
use super::kernel::{Kernel, uniform};
use super::rows::{append, row};
use super::settings::quick;
use super::share::{Kind, Share, Work};
use super::timer::{Timer, noise};

/// A rate, in units of 10⁹ a second.
#[derive(Clone, Debug)]
pub struct Rate {
    pub giga: f64,
    /// The time at twice the length over the time.
    pub ratio: f64,
    /// The fastest variant of the loop.
    pub form: String,
}

/// The rates of a device.
#[derive(Clone, Debug)]
pub struct Ceilings {
    pub device: String,
    /// Bytes read and written, for buffers far larger than caches.
    pub copy_gbs: Rate,
    /// f32 multiply-adds, two operations each.
    pub fma_gflops: Rate,
    pub exp2_gps: Rate,
    /// Bytes of vec4<f32> loads from workgroup memory, without bank conflicts.
    pub workgroup_gbs: Rate,
    /// Rates by fragment; empty without matrix units.
    pub matrix: Vec<MatrixCeilings>,
}

/// The rates of matrix units, f16 · f16 summed in f32.
#[derive(Clone, Debug)]
pub struct MatrixCeilings {
    /// The side of the square fragments.
    pub side: u32,
    /// Multiply-adds of fragments in registers.
    pub gflops: Rate,
    /// Bytes of fragments loaded from workgroup memory, row by row. Each fragment is for one
    /// multiply-add.
    pub rows_gbs: Rate,
    /// The same bytes, column by column.
    pub columns_gbs: Rate,
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        writeln!(f, "ceilings of {}", self.device)?;
        writeln!(f, "{:44} {:>10} {:8} {:>12}  form", "", "rate", "", "twice, time")?;
        for Line { name, rate, unit, .. } in self.lines() {
            writeln!(f, "{name:44} {:10.1} {unit:8} {:11.2}x  {}", rate.giga, rate.ratio, rate.form)?;
        }
        Ok(())
    }
}

/// A rate in words.
struct Line<'a> {
    /// The rate's name in files of rows.
    what: String,
    name: String,
    rate: &'a Rate,
    unit: &'static str,
}

impl Ceilings {
    fn lines(&self) -> Vec<Line<'_>> {
        let line =
            |what: &str, name: &str, rate, unit| Line { what: what.into(), name: name.into(), rate, unit };
        let mut lines = vec![
            line("copy", "copy, read and written", &self.copy_gbs, "GB/s"),
            line("fma", "f32 multiply-add", &self.fma_gflops, "GFLOP/s"),
            line("exp2", "exp2", &self.exp2_gps, "G/s"),
            line("workgroup", "workgroup memory, vec4<f32> loads", &self.workgroup_gbs, "GB/s"),
        ];
        for MatrixCeilings { side, gflops, rows_gbs, columns_gbs } in &self.matrix {
            let what = |more: &str| format!("matrix {side}×{side}{more}");
            let name = |more: &str| format!("fragments {side}x{side}{more}");
            let loads = " from workgroup memory, ";
            lines.push(line(&what(""), &name(", multiply-add"), gflops, "GFLOP/s"));
            lines.push(line(&what(" rows"), &name(&format!("{loads}rows")), rows_gbs, "GB/s"));
            lines.push(line(&what(" columns"), &name(&format!("{loads}columns")), columns_gbs, "GB/s"));
        }
        lines
    }

    pub fn append_rows(&self, gpu: &Gpu) {
        for Line { what, rate, unit, .. } in self.lines() {
            append(&Row { value: Some(rate.giga), unit: Some(unit.into()), ..row(gpu, "ceilings", &what) });
        }
    }

    /// Returns the least time of `work`, with `ms`. Returns `None` if the device has no units of
    /// that kind.
    pub fn share(&self, kind: Kind, work: Work, ms: f64) -> Option<Share> {
        let gflops = match kind {
            Kind::Plain => self.fma_gflops.giga,
            Kind::Matrix => self.matrix.iter().map(|matrix| matrix.gflops.giga).reduce(f64::max)?,
        };
        let Work { flops, bytes } = work;
        Some(Share { arithmetic: flops / gflops / 1e6, memory: bytes / self.copy_gbs.giga / 1e6, ms })
    }

    /// Measures the ceilings. `fragments`: the sides of the fragments of the device's matrix units.
    pub async fn measure(gpu: &Gpu, fragments: &[u32], timer: &Timer) -> Self {
        let bench = Bench::new(gpu, timer);
        let copy_gbs = bench.copy().await;
        let fma_gflops = best(forms(&[4, 3, 2]), async |chains| bench.fma(*chains).await).await;
        let exp2_gps = best(forms(&[2, 4, 1]), async |chains| bench.exp2(*chains).await).await;
        let workgroup_gbs = bench.workgroup().await;
        let mut matrix = Vec::new();
        for &side in forms(fragments) {
            matrix.push(MatrixCeilings {
                side,
                gflops: best(forms(&[[2, 2], [2, 4]]), async |grid| bench.multiply(side, *grid).await).await,
                rows_gbs: bench.load(side, "rows").await,
                columns_gbs: bench.load(side, "columns").await,
            });
        }
        let device = gpu.device().adapter_info().name;
        Ceilings { device, copy_gbs, fma_gflops, exp2_gps, workgroup_gbs, matrix }
    }
}

/// Returns the variants to try, the most promising first. A quick run tries only the first.
fn forms<T>(all: &[T]) -> impl Iterator<Item = &T> {
    all.iter().take(if quick() { 1 } else { usize::MAX })
}

async fn best<T>(forms: impl Iterator<Item = T>, measure: impl AsyncFn(T) -> Rate) -> Rate {
    let mut rates = Vec::new();
    for form in forms {
        rates.push(measure(form).await);
    }
    rates.into_iter().max_by(|x, y| x.giga.total_cmp(&y.giga)).expect("at least one form")
}

/// Invocations of a workgroup that uses no matrix units.
const LANES: usize = 256;
/// Unrolled steps in a turn of a loop, so that the loop counter costs little.
const STEPS: usize = 16;
/// `x · A + B` and `exp2(C − x)` keep changing for thousands of steps, without overflow.
const A: f32 = -0.999;
const B: f32 = 1.0;
const C: f32 = 1.9;
/// Workgroups that store fragments in separate places. The other workgroups repeat their stores.
const SLOTS: usize = 16;
/// The tile of fragments in workgroup memory: rows, columns, and columns with padding. The padding
/// separates rows by an odd number of 16-byte units.
const TILE: [usize; 3] = [64, 64, 72];

/// The beginning of every loop's text.
const HEAD: &str = "
struct Params { turns: u32, step: u32, a: f32, b: f32 }
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(1) var<uniform> p: Params;
";

/// A loop, and the buffer of its results.
struct Loop {
    kernel: Kernel,
    params: wgpu::Buffer,
    /// `step`, `a` and `b`.
    constants: [u32; 3],
    out: wgpu::Buffer,
}

struct Bench<'a> {
    gpu: &'a Gpu,
    timer: &'a Timer,
    software: bool,
    /// Workgroups of a dispatch: many for each core, so that few cores idle at the end.
    groups: usize,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu, timer: &'a Timer) -> Self {
        let software = device::software(gpu);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Bench { gpu, timer, software, groups: if software { (8 * cores).max(SLOTS) } else { 8192 } }
    }

    /// Returns the rate of a run that does `work` a turn. It takes the fastest of several runs that
    /// are long enough for the clock.
    async fn rate(&self, form: String, work: f64, mut run: impl AsyncFnMut(u32) -> Duration) -> Rate {
        let (least, rounds) = match (quick(), self.software) {
            (true, _) => (Duration::from_millis(1), 3..=3),
            (false, true) => (Duration::from_millis(5), 40..=90),
            (false, false) => (Duration::from_millis(10), 10..=90),
        };
        let mut turns = 1;
        while run(turns).await < least {
            assert!(turns < 1 << 28, "{form}: {turns} turns take no time");
            turns *= 2;
        }
        let [mut once, mut twice] = [f64::MAX; 2];
        let trusted = 1.8..=2.2;
        for round in 1..=*rounds.end() {
            once = once.min(run(turns).await.as_secs_f64());
            twice = twice.min(run(2 * turns).await.as_secs_f64());
            // Other programs may use the processor on which a software driver runs.
            if round >= *rounds.start() && trusted.contains(&(twice / once)) {
                break;
            }
        }
        let giga = f64::from(turns) * work / once.min(twice / 2.0) / 1e9;
        let ratio = twice / once;
        if !trusted.contains(&ratio) && !quick() {
            println!("warning: {form}: twice the work takes {ratio:.2} of the time; do not trust its rate");
        }
        Rate { giga, ratio, form }
    }

    async fn copy(&self) -> Rate {
        let limits = self.gpu.device().limits();
        let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        let most = most.min(if self.software { 1 << if quick() { 22 } else { 26 } } else { 1 << 28 });
        let worth = &CopyForm::ALL[..if self.software { 3 } else { 2 }];
        best(forms(worth), async |form| {
            let copy = Copy::new(self.gpu, *form, (1 << most.ilog2()) / 4);
            self.timer.time_async(|pass| copy.record(pass)).await;
            copy.validate(self.gpu).await;
            self.rate(form.to_string(), copy.bytes(), async |turns| {
                self.timer.time_async(|pass| (0..turns).for_each(|_| copy.record(pass))).await
            })
            .await
        })
        .await
    }

    /// Compiles `text`, which has a function `main` and binds `data` to 2. `out` has memory for
    /// `results`.
    fn compile<T: bytemuck::NoUninit>(
        &self,
        text: &str,
        data: &[T],
        results: usize,
        [a, b]: [f32; 2],
        step: usize,
    ) -> Loop {
        let params = uniform(self.gpu);
        let out = self.gpu.buffer(results * 4).expect("room for results");
        let data = self.gpu.upload(data).expect("operands");
        let kernel = Kernel::new(self.gpu, text, &[&out, &params, &data]);
        Loop { kernel, params, constants: [step as u32, a.to_bits(), b.to_bits()], out }
    }

    async fn run(&self, kernel: &Loop, turns: u32) -> Duration {
        let [step, a, b] = kernel.constants;
        self.gpu.queue().write_buffer(&kernel.params, 0, bytemuck::bytes_of(&[turns, step, a, b]));
        self.timer.time_async(|pass| kernel.kernel.dispatch(pass, [self.groups as u32, 1])).await
    }

    /// Checks that the first `results` after a few turns repeat `want`.
    async fn validate(&self, what: &str, kernel: &Loop, results: usize, want: impl Fn(usize) -> Vec<f64>) {
        for turns in [1, 2, 5] {
            self.run(kernel, turns as u32).await;
            let got: Vec<f32> = self.gpu.download_async(&kernel.out, results).await.expect("results");
            let want = want(turns);
            for (n, (got, want)) in got.iter().zip(want.iter().cycle()).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error <= 1e-4 * (1.0 + want.abs()),
                    "{what}, {turns} turns: result {n} is {got}, not {want}"
                );
            }
        }
    }

    /// Makes a loop with `chains` vectors an invocation. A step changes them by `step`, a WGSL
    /// expression of x, a and b.
    fn chains(&self, what: &str, step: &str, constants: [f32; 2], chains: usize) -> (Loop, String, Vec<f32>) {
        let each = |line: &dyn Fn(usize) -> String| (0..chains).map(line).collect::<Vec<_>>().join("\n");
        let start = each(&|n| format!("var x{n} = data[lane + {}u];", n * LANES));
        let turn = each(&|n| format!("x{n} = step(x{n}, a, b);"));
        let sum = each(&|n| format!("sum += x{n};"));
        let text = format!(
            "{HEAD}
@group(0) @binding(2) var<storage, read> data: array<vec4<f32>>;
fn step(x: vec4<f32>, a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {{ return {step}; }}
@compute @workgroup_size({LANES})
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    let a = vec4(p.a);
    let b = vec4(p.b);
    {start}
    for (var i = 0u; i < p.turns; i++) {{
        {}
    }}
    var sum = vec4<f32>();
    {sum}
    out[id.x] = dot(sum, vec4(1.0));
}}",
            turn.repeat(STEPS)
        );
        let data = noise(4 * chains * LANES, 1);
        let kernel = self.compile(&text, &data, self.groups * LANES, constants, 0);
        (kernel, format!("{} {what} an invocation", 4 * chains), data)
    }

    /// Returns the final values of a workgroup's invocations.
    fn chained(data: &[f32], turns: usize, step: impl Fn(f64) -> f64) -> Vec<f64> {
        let mut sums = vec![0.0; LANES];
        for (n, x) in data.iter().enumerate() {
            let end = (0..turns * STEPS).fold(f64::from(*x), |x, _| step(x));
            sums[n / 4 % LANES] += end;
        }
        sums
    }

    async fn fma(&self, chains: usize) -> Rate {
        let (kernel, form, data) = self.chains("sums", "fma(x, a, b)", [A, B], chains);
        self.validate(&form, &kernel, self.groups * LANES, |turns| {
            Self::chained(&data, turns, |x| x * f64::from(A) + f64::from(B))
        })
        .await;
        let work = (self.groups * LANES * STEPS * 4 * chains * 2) as f64;
        self.rate(form, work, async |turns| self.run(&kernel, turns).await).await
    }

    async fn exp2(&self, chains: usize) -> Rate {
        let (kernel, form, data) = self.chains("powers", "exp2(a - x)", [C, 0.0], chains);
        self.validate(&form, &kernel, self.groups * LANES, |turns| {
            Self::chained(&data, turns, |x| (f64::from(C) - x).exp2())
        })
        .await;
        let work = (self.groups * LANES * STEPS * 4 * chains) as f64;
        self.rate(form, work, async |turns| self.run(&kernel, turns).await).await
    }

    /// Neighbours load neighbouring vectors. The compiler knows the offsets, but not their base.
    async fn workgroup(&self) -> Rate {
        const LOADS: usize = 8;
        let each = |line: &dyn Fn(usize) -> String| (0..LOADS).map(line).collect::<Vec<_>>().join("\n");
        let start = each(&|n| format!("var x{n} = vec4<f32>();"));
        let turn = each(&|n| format!("x{n} += tile[at + {}u];", n * 64));
        let sum = each(&|n| format!("sum += x{n};"));
        let text = format!(
            "{HEAD}
@group(0) @binding(2) var<storage, read> data: array<vec4<f32>>;
var<workgroup> tile: array<vec4<f32>, 1024>;
@compute @workgroup_size({LANES})
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{
    for (var n = lane; n < 1024u; n += {LANES}u) {{ tile[n] = data[n]; }}
    workgroupBarrier();
    {start}
    var at = lane;
    for (var i = 0u; i < p.turns; i++) {{
        {turn}
        at = (at + p.step) & 511u;
    }}
    var sum = vec4<f32>();
    {sum}
    out[id.x] = dot(sum, vec4(1.0));
}}"
        );
        let data = noise(4096, 1);
        let kernel = self.compile(&text, &data, self.groups * LANES, [0.0; 2], LANES);
        let form = format!("{LOADS} a turn, {LANES} invocations");
        self.validate(&form, &kernel, self.groups * LANES, |turns| {
            let load = |at: usize| data[4 * at..][..4].iter().map(|x| f64::from(*x)).sum::<f64>();
            let loads = |lane, turn| (0..LOADS).map(move |n| load((lane + turn * LANES) % 512 + n * 64));
            (0..LANES).map(|lane| (0..turns).flat_map(|turn| loads(lane, turn)).sum()).collect()
        })
        .await;
        let work = (self.groups * LANES * LOADS * 16) as f64;
        self.rate(form, work, async |turns| self.run(&kernel, turns).await).await
    }

    /// Returns the invocations of a workgroup with at least four subgroups, and the most subgroups
    /// that it may have.
    fn subgroups(&self) -> (usize, usize) {
        let info = self.gpu.device().adapter_info();
        let most = self.gpu.device().limits().max_compute_invocations_per_workgroup;
        let lanes = (4 * info.subgroup_max_size).min(most);
        (lanes as usize, (lanes / info.subgroup_min_size) as usize)
    }

    /// Returns the text of a loop on fragments. Each subgroup has `sums` fragments and stores them
    /// at the end. The number of subgroups is stored behind all slots. `body` uses `subgroup`, and
    /// ends in the loop.
    fn fragments(&self, side: u32, sums: usize, globals: &str, body: &str) -> String {
        let (lanes, most) = self.subgroups();
        let square = (side * side) as usize;
        let each = |line: &dyn Fn(usize) -> String| (0..sums).map(line).collect::<Vec<_>>().join("\n");
        let start = each(&|n| format!("var c{n} = Sums();"));
        let store = each(&|n| {
            format!("let to{n} = slot + {}u;\ncoopStoreT(c{n}, &out[to{n}], {side}u);", n * square)
        });
        format!(
            "enable f16;
enable wgpu_cooperative_matrix;
diagnostic(off, derivative_uniformity);
alias Left = coop_mat{side}x{side}<f16, A>;
alias Right = coop_mat{side}x{side}<f16, B>;
alias Sums = coop_mat{side}x{side}<f32, C>;
{HEAD}
@group(0) @binding(2) var<storage, read> data: array<f16>;
{globals}
@compute @workgroup_size({lanes})
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32,
        @builtin(subgroup_id) subgroup: u32, @builtin(num_subgroups) subgroups: u32) {{
    {start}
    {body}
    let slot = (id.x % {SLOTS}u * subgroups + subgroup) * {}u;
    {store}
    out[{}u] = f32(subgroups);
}}",
            sums * square,
            SLOTS * most * sums * square
        )
    }

    /// Returns the number of subgroups that `kernel` found. First it checks that the results are
    /// those of `want` for each subgroup.
    async fn validate_fragments(
        &self,
        what: &str,
        kernel: &Loop,
        sums: usize,
        want: impl Fn(usize, usize) -> Vec<f64>,
    ) -> usize {
        let (_, most) = self.subgroups();
        self.run(kernel, 1).await;
        let all: Vec<f32> =
            self.gpu.download_async(&kernel.out, SLOTS * most * sums + 1).await.expect("results");
        let subgroups = all[SLOTS * most * sums] as usize;
        assert!((1..=most).contains(&subgroups), "{what}: {subgroups} subgroups");
        self.validate(what, kernel, SLOTS * subgroups * sums, |turns| {
            (0..subgroups).flat_map(|subgroup| want(subgroup, turns)).collect()
        })
        .await;
        subgroups
    }

    /// Measures products of `rows` fragments with `columns` fragments, in registers.
    async fn multiply(&self, side: u32, [rows, columns]: [usize; 2]) -> Rate {
        let (_, most) = self.subgroups();
        let n = side as usize;
        let square = n * n;
        let own = (rows + columns) * square;
        let load = |m: usize| {
            let (name, role) = if m < rows { ("a", "Left") } else { ("b", "Right") };
            let k = if m < rows { m } else { m - rows };
            let at = format!("let at{m} = subgroup * {own}u + {}u;", m * square);
            format!("{at}\nlet {name}{k} = coopLoadT<{role}>(&data[at{m}], {side}u);\n")
        };
        let loads: String = (0..rows + columns).map(load).collect();
        let turn: String = (0..rows * columns)
            .map(|c| format!("c{c} = coopMultiplyAdd(a{}, b{}, c{c});\n", c / columns, c % columns))
            .collect();
        let body = format!("{loads}for (var i = 0u; i < p.turns; i++) {{\n{turn}}}");
        let text = self.fragments(side, rows * columns, "", &body);
        let data: Vec<f16> = noise(most * own, 1).into_iter().map(f16::from_f32).collect();
        let sums = rows * columns * square;
        let kernel = self.compile(&text, &bits(&data), SLOTS * most * sums + 1, [0.0; 2], 0);
        let form = format!("{rows} by {columns} fragments a subgroup");
        let subgroups = self
            .validate_fragments(&form, &kernel, sums, |subgroup, turns| {
                let fragment = |m: usize| &data[subgroup * own + m * square..][..square];
                let sum = |c: usize| {
                    let (a, b) = (fragment(c / columns), fragment(rows + c % columns));
                    product(n, turns as f64, |i, k| a[i * n + k], |k, j| b[k * n + j])
                };
                (0..rows * columns).flat_map(sum).collect()
            })
            .await;
        let work = (self.groups * subgroups * sums * n * 2) as f64;
        self.rate(form, work, async |turns| self.run(&kernel, turns).await).await
    }

    /// Measures products of one fragment with the fragments of a tile row. They are loaded row by
    /// row or column by column, by `order`.
    async fn load(&self, side: u32, order: &str) -> Rate {
        let (lanes, _) = self.subgroups();
        let n = side as usize;
        let square = n * n;
        let [height, width, stride] = TILE;
        let words = height * stride;
        let count = width / n;
        let rows = order == "rows";
        let coop_load = if rows { "coopLoadT" } else { "coopLoad" };
        let turn: String = (0..count)
            .map(|c| {
                let at = format!("let at{c} = first * {stride}u + {}u;", c * n);
                let load = format!("{coop_load}<Right>(&tile[at{c}], {stride}u)");
                format!("{at}\nc{c} = coopMultiplyAdd(a, {load}, c{c});\n")
            })
            .collect();
        let body = format!(
            "for (var n = lane; n < {words}u; n += {lanes}u) {{ tile[n] = data[n]; }}
    workgroupBarrier();
    let a = coopLoadT<Left>(&data[{words}], {side}u);
    var first = subgroup * {side}u % {height}u;
    for (var i = 0u; i < p.turns; i++) {{
        {turn}
        first = (first + p.step) % {height}u;
    }}"
        );
        let tile = format!("var<workgroup> tile: array<f16, {words}>;");
        let text = self.fragments(side, count, &tile, &body);
        let data: Vec<f16> = noise(words + square, 1).into_iter().map(f16::from_f32).collect();
        let (_, most) = self.subgroups();
        let sums = count * square;
        let kernel = self.compile(&text, &bits(&data), SLOTS * most * sums + 1, [0.0; 2], n);
        let form = format!("{count} a turn, by {order}");
        let subgroups = self
            .validate_fragments(&form, &kernel, sums, |subgroup, turns| {
                let (tile, a) = data.split_at(words);
                let sum = |c: usize| {
                    let mut sum = vec![0.0; square];
                    for turn in 0..turns {
                        let corner = (subgroup + turn) * n % height * stride + c * n;
                        let b = |k, j| tile[corner + if rows { k * stride + j } else { j * stride + k }];
                        let one = product(n, 1.0, |i, k| a[i * n + k], b);
                        sum.iter_mut().zip(one).for_each(|(sum, x)| *sum += x);
                    }
                    sum
                };
                (0..count).flat_map(sum).collect()
            })
            .await;
        let work = (self.groups * subgroups * sums * 2) as f64;
        self.rate(form, work, async |turns| self.run(&kernel, turns).await).await
    }
}

fn bits(x: &[f16]) -> Vec<u16> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Returns `times` the product of two n × n matrices.
fn product(
    n: usize,
    times: f64,
    a: impl Fn(usize, usize) -> f16,
    b: impl Fn(usize, usize) -> f16,
) -> Vec<f64> {
    let sum = |i, j| (0..n).map(|k| a(i, k).to_f64() * b(k, j).to_f64()).sum::<f64>();
    (0..n * n).map(|m| times * sum(m / n, m % n)).collect()
}
