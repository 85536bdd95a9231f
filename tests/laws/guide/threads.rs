use std::thread;

use wgpu_attention::{Attention, Error, Forward, Scratch, wgpu};

/// Records each call in a thread. Returns the command buffers in the order of `calls`.
pub fn record(attention: &Attention, calls: &[Forward]) -> Result<Vec<wgpu::CommandBuffer>, Error> {
    thread::scope(|scope| {
        let threads: Vec<_> =
            calls.iter().map(|call| scope.spawn(move || record_one(attention, call))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a recording thread")).collect()
    })
}

/// The encoder and the scratch belong to the thread.
fn record_one(attention: &Attention, call: &Forward) -> Result<wgpu::CommandBuffer, Error> {
    let device = attention.pipelines().device();
    let mut scratch = Scratch::new(device, attention.scratch_size(call)?)?;
    let mut encoder = device.create_command_encoder(&Default::default());
    attention.forward(&mut encoder, call, &mut scratch)?;
    Ok(encoder.finish())
}
