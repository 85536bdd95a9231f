//! A device, its clock and its ceilings. It checks the result before it measures the time.

use std::cell::OnceCell;
use std::time::Duration;

use criterion::BenchmarkGroup;
use criterion::measurement::WallTime;
use wgpu_attention::reference::compare::{Difference, Mismatch};
use wgpu_attention::{Gpu, wgpu};

use super::ceilings::Ceilings;
use super::device::{self, Opened};
use super::settings::quick;
use super::timer::Timer;
pub use super::timer::median;

pub struct Bed {
    pub instance: wgpu::Instance,
    pub gpu: Gpu,
    /// The sides of the fragments of the device's matrix units.
    pub fragments: Vec<u32>,
    pub timer: Timer,
    ceilings: OnceCell<Ceilings>,
}

/// A pass whose result was right.
pub struct Checked<'a> {
    record: Box<dyn FnMut(&mut wgpu::ComputePass) + 'a>,
}

impl Bed {
    /// Opens the device. Returns `None`, with a message, if it has no clock.
    pub fn open() -> Option<Self> {
        let Opened { instance, gpu, fragments, .. } = device::open();
        let name = gpu.device().adapter_info().name;
        let Some(timer) = Timer::new(&gpu) else {
            println!("device: {name}: skipped, it has no timestamp queries");
            return None;
        };
        println!("device: {name}");
        if quick() {
            println!(
                "quick: a few runs of small problems, after their results were compared; the times say nothing"
            );
        }
        Some(Bed { instance, gpu, fragments, timer, ceilings: OnceCell::new() })
    }

    pub fn software(&self) -> bool {
        device::software(&self.gpu)
    }

    pub fn f16(&self) -> bool {
        self.gpu.device().features().contains(wgpu::Features::SHADER_F16)
    }

    /// Returns the ceilings, which are measured at the first call.
    pub fn ceilings(&self) -> &Ceilings {
        self.ceilings.get_or_init(|| {
            let ceilings = pollster::block_on(Ceilings::measure(&self.gpu, &self.fragments, &self.timer));
            println!("\n{ceilings}");
            ceilings
        })
    }

    /// Runs a pass, and checks its output with `judge`.
    ///
    /// # Panics
    /// If the output is wrong: a wrong kernel has no time.
    pub fn check<'a>(
        &self,
        what: &str,
        mut record: impl FnMut(&mut wgpu::ComputePass) + 'a,
        judge: impl FnOnce() -> Result<Difference, Mismatch>,
    ) -> Checked<'a> {
        self.timer.time(&mut record);
        judge().unwrap_or_else(|wrong| panic!("{what} computes something else: {wrong}"));
        Checked { record: Box::new(record) }
    }

    /// Returns the time on the device.
    pub fn time(&self, pass: &mut Checked) -> Duration {
        self.timer.time(&mut pass.record)
    }

    /// Passes the device times of a pass to criterion, and returns their median in ms. The pass is
    /// prepared when criterion runs it.
    pub fn measure<'a>(
        &self,
        group: &mut BenchmarkGroup<WallTime>,
        id: &str,
        prepare: impl FnOnce() -> Checked<'a>,
    ) -> Option<f64> {
        let (mut prepare, mut pass, mut times) = (Some(prepare), None, Vec::new());
        group.bench_function(id, |b| {
            let pass = pass.get_or_insert_with(|| prepare.take().expect("one preparation")());
            b.iter_custom(|iterations| {
                let mut run = || {
                    let time = self.time(pass);
                    times.push(time.as_secs_f64() * 1e3);
                    time
                };
                (0..iterations).map(|_| run()).sum()
            });
        });
        median(times)
    }
}
