//! `scripts/gpu cargo bench --bench ceilings`
//!
//! What the device does at best, for comparison with what kernels reach.

#[path = "common/ceilings.rs"]
mod ceilings;
#[path = "common/copy.rs"]
mod copy;
#[path = "common/device.rs"]
mod device;
#[path = "common/kernel.rs"]
mod kernel;
#[path = "common/timer.rs"]
mod timer;

fn main() {
    let (gpu, fragments) = device::open();
    let timer = timer::Timer::new(&gpu).expect("timestamp queries");
    print!("{}", ceilings::Ceilings::measure(&gpu, &fragments, &timer));
}
