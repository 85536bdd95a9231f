//! `scripts/gpu cargo bench -p benches --bench scaling [-- [FILTER] [--quick]]`
//!
//! Measures the growth of time and memory with length: self-attention of one head, 256 to 65536
//! tokens. Each result is compared with the reference first, in sampled rows. Exponents are fitted
//! to the upper part of the range, where the fixed cost of a call matters least.

use std::time::Duration;

use common::bed::Bed;
use common::problem::{Case, Problem, Rule, Way, count};
use common::rows::{append, dtype_name, of_attention, row};
use common::settings;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, SamplingMode, Throughput, criterion_group, criterion_main};
use rows::Row;
use wgpu_attention::{DType, Gpu, Scratch, Shape, wgpu};

/// The longest run on a software driver, in ms. Longer runs are skipped.
const LONGEST: f64 = 6000.0;
/// The range of the fit: lengths from the longest down to this fraction of it.
const UPPER: usize = 16;

struct Series {
    way: Way,
    rule: Rule,
    dtype: DType,
    /// Exponents of time, and of temporary memory if it grows.
    time: f64,
    scratch: Option<f64>,
}

struct Point {
    length: usize,
    ms: f64,
    scratch: u64,
    outputs: u64,
    /// The growth of the driver's memory for the scratch, and for a call without its scratch.
    allocated: Option<[u64; 2]>,
}

/// Returns the device's bytes in use, if wgpu reports them.
fn in_use(gpu: &Gpu) -> Option<u64> {
    // Dropped resources are freed once the device is idle.
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).expect("a device");
    gpu.device().generate_allocator_report().map(|report| report.total_allocated_bytes)
}

impl Series {
    fn name(&self) -> String {
        let mask = self.rule.name();
        format!("{} {mask} {}", self.way.name(), dtype_name(self.dtype))
    }

    fn run(&self, c: &mut Criterion, bed: &Bed) {
        let name = self.name();
        let mut group = c.benchmark_group(format!("scaling/{name}"));
        group.sampling_mode(SamplingMode::Flat).sample_size(10);
        if !settings::quick() {
            group.warm_up_time(Duration::from_millis(1)).measurement_time(Duration::from_millis(500));
        }
        let mut points: Vec<Point> = Vec::new();
        let mut end = None;
        for length in (8..=if settings::quick() { 10 } else { 16 }).map(|n| 1 << n) {
            if let Some(last) = points.last()
                && bed.software()
            {
                let expected = last.ms * (length as f64 / last.length as f64).powf(self.time);
                if expected > LONGEST {
                    end =
                        Some(format!("{length} would take about {:.0} s on this processor", expected / 1e3));
                    break;
                }
            }
            let case = Case::new(Shape::new(1, 1, length, 64), self.rule, self.dtype);
            group.throughput(Throughput::Elements(length as u64));
            let made = Problem::new(&bed.gpu, case).and_then(|problem| {
                let before = in_use(&bed.gpu);
                Ok((problem.scratch(&bed.gpu, self.way)?, problem, before))
            });
            let (scratch, problem, before) = match made {
                Ok(made) => made,
                Err(error) => {
                    end = Some(format!("{length}: {error}"));
                    break;
                }
            };
            points.extend(self.point(&mut group, bed, case, &problem, scratch, before));
        }
        drop(group);
        // A filter may select another series.
        if !points.is_empty() {
            self.report(&bed.gpu, &points, end);
        }
    }

    fn point(
        &self,
        group: &mut BenchmarkGroup<WallTime>,
        bed: &Bed,
        case: Case,
        problem: &Problem,
        scratch: Scratch,
        before: Option<u64>,
    ) -> Option<Point> {
        let length = case.shape.q_len;
        let bytes = scratch.size().total();
        let with_scratch = in_use(&bed.gpu);
        let mut allocated = None;
        let ms = bed.measure(group, &length.to_string(), || {
            let pass = problem.check(bed, self.way, scratch);
            allocated =
                before.zip(with_scratch).zip(in_use(&bed.gpu)).map(|((before, with_scratch), after)| {
                    [with_scratch.saturating_sub(before), after.saturating_sub(with_scratch)]
                });
            if let Some([scratch, call]) = allocated {
                // Allocators round up. The driver's parameters and counters are small.
                assert!(
                    (bytes..=bytes + (1 << 16)).contains(&scratch),
                    "{bytes} bytes of scratch take {scratch}"
                );
                assert!(call <= 1 << 20, "a call keeps {call} bytes beside its scratch of {bytes}");
            }
            pass
        })?;
        let outputs = (count(&case.shape.out()) * self.dtype.bytes()) as u64;
        let row = row(&bed.gpu, "scaling", self.way.name());
        append(&Row {
            ms: Some(ms),
            bytes: Some((bytes + outputs) as f64),
            ..of_attention(row, case.shape, &self.rule.name(), self.dtype)
        });
        Some(Point { length, ms, scratch: bytes, outputs, allocated })
    }

    fn report(&self, gpu: &Gpu, points: &[Point], end: Option<String>) {
        let name = self.name();
        println!("\nscaling, {name}");
        println!("{:>8} {:>12} {:>12} {:>12} {:>12}", "length", "ms", "scratch", "outputs", "allocated");
        for Point { length, ms, scratch, outputs, allocated } in points {
            let allocated =
                allocated.map_or("not known".into(), |[scratch, call]| format!("{scratch} + {call}"));
            println!("{length:8} {ms:12.3} {scratch:12} {outputs:12} {allocated:>12}");
        }
        if let Some(end) = end {
            println!("ends there: {end}");
        }
        let longest = points.iter().map(|point| point.length).max().unwrap_or_default();
        let upper: Vec<&Point> = points.iter().filter(|point| point.length * UPPER >= longest).collect();
        let range = format!("over {} to {longest}", upper[0].length);
        let fit = |of: &str, value: &dyn Fn(&Point) -> f64| {
            let fitted: Vec<[f64; 2]> =
                upper.iter().map(|point| [point.length as f64, value(point)]).collect();
            let Some(exponent) = exponent(&fitted) else {
                println!("{of}: no exponent, of {} lengths", fitted.len());
                return None;
            };
            append(&Row {
                mask: Some(self.rule.name()),
                dtype: Some(dtype_name(self.dtype).into()),
                value: Some(exponent),
                unit: Some(format!("{of} exponent")),
                ..row(gpu, "scaling", self.way.name())
            });
            Some(exponent)
        };
        if let Some(time) = fit("time", &|point| point.ms) {
            println!("time ~ n^{time:.2} {range}; expected: {}", self.time);
        }
        let most = points.iter().map(|point| point.scratch).max().unwrap_or_default();
        match self.scratch {
            None => {
                let last = points[points.len() - 1].scratch;
                println!(
                    "scratch: {most} bytes at most, {last} at {longest}; expected: none, or what fills the device"
                );
                assert!(last <= points[0].scratch, "{name}: scratch grows with the length");
            }
            Some(expected) => {
                if let Some(scratch) = fit("scratch", &|point| point.scratch as f64) {
                    println!("scratch ~ n^{scratch:.2} {range}; expected: {expected}");
                    assert!((scratch - expected).abs() < 0.01, "{name}: scratch grows otherwise");
                }
            }
        }
        if let Some(memory) = fit("memory", &|point| (point.scratch + point.outputs) as f64) {
            println!("scratch and outputs ~ n^{memory:.2} {range}");
        }
    }
}

/// Returns the exponent of the best fit, by least squares in logarithms. Returns `None` for fewer
/// than three points.
fn exponent(points: &[[f64; 2]]) -> Option<f64> {
    if points.len() < 3 {
        return None;
    }
    let logs: Vec<[f64; 2]> = points.iter().map(|point| point.map(f64::ln)).collect();
    let mean = |axis: usize| logs.iter().map(|point| point[axis]).sum::<f64>() / logs.len() as f64;
    let means = [mean(0), mean(1)];
    let sum = |a: usize, b: usize| logs.iter().map(|p| (p[a] - means[a]) * (p[b] - means[b])).sum::<f64>();
    Some(sum(0, 1) / sum(0, 0))
}

fn all(c: &mut Criterion) {
    let Some(bed) = Bed::open() else { return };
    let fused = |rule, dtype, time| Series { way: Way::Fused, rule, dtype, time, scratch: None };
    let staged =
        Series { way: Way::Staged, rule: Rule::Causal, dtype: DType::F32, time: 2.0, scratch: Some(2.0) };
    let mut series =
        vec![fused(Rule::Causal, DType::F32, 2.0), fused(Rule::Window(256), DType::F32, 1.0), staged];
    // On a processor f16 is no faster. If there are matrix units, f16 uses them.
    if bed.software() {
        println!("f16: left out, a processor is no faster in it");
    } else if bed.f16() {
        let way = if bed.fragments.is_empty() { Way::Fused } else { Way::Matrix };
        series.push(Series { way, ..fused(Rule::Causal, DType::F16, 2.0) });
    }
    series.iter().for_each(|series| series.run(c, &bed));
}

criterion_group! {
    name = benches;
    config = settings::criterion();
    targets = all
}
criterion_main!(benches);
