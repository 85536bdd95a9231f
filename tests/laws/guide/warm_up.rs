use wgpu_attention::{Cache, CacheConfig, Error, Gpu, wgpu};

/// Compiles and runs everything that generation needs: `step` with the rows of a prompt, then with
/// one row. The steps use a temporary cache. Waits for the device.
pub fn warm_up(
    gpu: &Gpu,
    config: CacheConfig,
    prompt: usize,
    mut step: impl FnMut(&mut Cache, usize) -> Result<(), Error>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut cache = Cache::with_pipelines(gpu.pipelines(), config)?;
    for rows in [prompt, 1] {
        step(&mut cache, rows)?;
    }
    gpu.device().poll(wgpu::PollType::wait_indefinitely())?;
    Ok(())
}
