
/// Flags the blocks of shaders that run. `tools/mutation` appends this file to a copy of
/// `src/lib.rs`.
mod coverage {
    use std::io::Write;
    use std::sync::{Arc, LazyLock, Mutex, OnceLock};

    const STUB: &str = "\nfn cover(n: u32) {}\n";
    const DECLARED: &str = "\n@group(1) @binding(0) var<storage, read_write> covered: array<u32>;
fn cover(n: u32) { covered[n] = 1u; }\n";

    /// The flags of the kernels of some pipelines, and the queue that reads them back.
    pub(crate) struct Flags {
        device: wgpu::Device,
        buffer: wgpu::Buffer,
        layout: wgpu::BindGroupLayout,
        group: wgpu::BindGroup,
        queue: OnceLock<wgpu::Queue>,
        /// Kernels without flags, because their device has no further storage buffer.
        skipped: Mutex<Vec<&'static str>>,
    }

    static ALL: Mutex<Vec<Arc<Flags>>> = Mutex::new(Vec::new());

    unsafe extern "C" {
        safe fn atexit(f: extern "C" fn()) -> i32;
    }

    /// Writes the flags when the process ends. wgpu needs a thread that has not ended.
    static AT_EXIT: LazyLock<i32> = LazyLock::new(|| {
        extern "C" fn write() {
            let _ = std::thread::spawn(write_all).join();
        }
        atexit(write)
    });

    pub(crate) fn with_stub(text: String) -> String {
        text + STUB
    }

    impl Flags {
        pub(crate) fn new(device: &wgpu::Device) -> Arc<Self> {
            LazyLock::force(&AT_EXIT);
            let buffer = buffer(device, wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC);
            let entry = wgpu::BindGroupLayoutEntry {
                binding: 0,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: false },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            };
            let descriptor = wgpu::BindGroupLayoutDescriptor { label: None, entries: &[entry] };
            let layout = device.create_bind_group_layout(&descriptor);
            let entry = wgpu::BindGroupEntry { binding: 0, resource: buffer.as_entire_binding() };
            let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
                label: None,
                layout: &layout,
                entries: &[entry],
            });
            let device = device.clone();
            let flags =
                Flags { device, buffer, layout, group, queue: OnceLock::new(), skipped: Mutex::default() };
            let flags = Arc::new(flags);
            if let Ok(mut all) = ALL.lock() {
                all.push(flags.clone());
            }
            flags
        }

        pub(crate) fn read_with(&self, queue: &wgpu::Queue) {
            let _ = self.queue.set(queue.clone());
        }

        /// The text with flags, their group and its layout, or the text alone.
        pub(crate) fn instrumented(
            &self,
            label: &'static str,
            text: &str,
            has_room: bool,
        ) -> (String, Option<(wgpu::BindGroupLayout, wgpu::BindGroup)>) {
            if has_room {
                return (text.replace(STUB, DECLARED), Some((self.layout.clone(), self.group.clone())));
            }
            if let Ok(mut skipped) = self.skipped.lock() {
                skipped.push(label);
            }
            (text.into(), None)
        }

        fn add_to(&self, queue: &wgpu::Queue, all: &mut [u32]) {
            let staging = buffer(&self.device, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
            let mut encoder = self.device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(&self.buffer, 0, &staging, 0, 4 * BLOCKS);
            queue.submit([encoder.finish()]);
            staging.slice(..).map_async(wgpu::MapMode::Read, |_| {});
            let _ = self.device.poll(wgpu::PollType::wait_indefinitely());
            if let Ok(mapped) = staging.slice(..).get_mapped_range() {
                for (sum, flag) in all.iter_mut().zip(bytemuck::cast_slice::<u8, u32>(&mapped)) {
                    *sum += flag;
                }
            }
        }
    }

    fn buffer(device: &wgpu::Device, usage: wgpu::BufferUsages) -> wgpu::Buffer {
        let descriptor =
            wgpu::BufferDescriptor { label: None, size: 4 * BLOCKS, usage, mapped_at_creation: false };
        device.create_buffer(&descriptor)
    }

    fn write_all() {
        let Some(path) = std::env::var_os("WGPU_ATTENTION_COVERED") else { return };
        let Ok(devices) = ALL.lock() else { return };
        let mut all = vec![0; BLOCKS as usize];
        let mut skipped = Vec::new();
        for flags in devices.iter() {
            if let Some(queue) = flags.queue.get() {
                flags.add_to(queue, &mut all);
            }
            skipped.extend(flags.skipped.lock().map(|labels| labels.clone()).unwrap_or_default());
        }
        skipped.sort_unstable();
        skipped.dedup();
        let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) else { return };
        let lost = devices.iter().filter(|flags| flags.queue.get().is_none()).count();
        let count = devices.len();
        let _ = writeln!(file, "# {count} sets of pipelines, {lost} unread; pipelines without flags: {skipped:?}");
        for (n, _) in all.iter().enumerate().filter(|(_, flag)| **flag != 0) {
            let _ = writeln!(file, "{n}");
        }
    }
}
