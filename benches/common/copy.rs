//! Copies of a buffer, to measure the rate of the device's memory.

use std::fmt;

use wgpu_attention::{Gpu, wgpu};

use super::kernel::{Kernel, uniform};
use super::timer::noise;

/// The way in which a copy is divided among invocations.
#[derive(Clone, Copy)]
pub enum CopyForm {
    /// Neighbours copy neighbouring vectors: the number of vectors each, and the invocations of a
    /// workgroup.
    Lanes(u32, u32),
    /// Each workgroup is one invocation and copies a run of this length, which is fastest on
    /// software drivers. It has a barrier and a loop that never runs, as the crate's kernels for
    /// such drivers have.
    Run(u32),
}

impl CopyForm {
    /// The variants to measure. The last one is for software drivers.
    pub const ALL: [CopyForm; 3] = [CopyForm::Lanes(1, 64), CopyForm::Lanes(4, 256), CopyForm::Run(4096)];
}

impl fmt::Display for CopyForm {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            CopyForm::Lanes(1, _) => f.write_str("a vector an invocation"),
            CopyForm::Lanes(each, _) => write!(f, "{each} vectors an invocation"),
            CopyForm::Run(each) => write!(f, "runs of {each} vectors"),
        }
    }
}

/// A kernel that copies a buffer.
pub struct Copy {
    kernel: Kernel,
    groups: u32,
    from: Vec<f32>,
    to: wgpu::Buffer,
}

impl Copy {
    /// Makes a copy of `words` f32 numbers, a multiple of 2²⁰.
    pub fn new(gpu: &Gpu, form: CopyForm, words: usize) -> Self {
        let (workgroup, each, body) = match form {
            CopyForm::Lanes(each, workgroup) => {
                let step = format!("dst[first + n * {workgroup}u] = src[first + n * {workgroup}u];");
                let first = format!("let first = group * {}u + lane;", each * workgroup);
                (workgroup, each, format!("{first} for (var n = 0u; n < {each}u; n++) {{ {step} }}"))
            }
            CopyForm::Run(each) => {
                let never = "if zero.x != 0u { for (var m = 0u; m < zero.y; m++) { n ^= m >> 31u; } }";
                let sixteen = "for (var m = 0u; m < 16u; m++) { dst[o + m] = src[o + m]; }";
                let turn = format!("{never} let o = (first + n) & 0x03ffffffu; {sixteen}");
                let first = format!("workgroupBarrier(); let first = (group & 0xffffu) * {each}u;");
                (1, each, format!("{first} for (var n = 0u; n < {each}u; n += 16u) {{ {turn} }}"))
            }
        };
        let text = format!(
            "@group(0) @binding(0) var<storage, read> src: array<vec4<f32>>;\n\
             @group(0) @binding(1) var<storage, read_write> dst: array<vec4<f32>>;\n\
             @group(0) @binding(2) var<uniform> zero: vec4<u32>;\n\
             @compute @workgroup_size({workgroup})\n\
             fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {{\n\
                 let group = id.y * 64u + id.x; let all = lane + zero.x;\n{body}\n}}\n"
        );
        let from = noise(words, 1);
        let src = gpu.upload(&from).expect("a buffer");
        let to = gpu.buffer(words * 4).expect("a buffer");
        let kernel = Kernel::new(gpu, &text, &[&src, &to, &uniform(gpu)]);
        Copy { kernel, groups: words as u32 / 4 / each / workgroup, from, to }
    }

    /// Returns the bytes that are read and written.
    pub fn bytes(&self) -> f64 {
        8.0 * self.from.len() as f64
    }

    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        self.kernel.dispatch(pass, [64, self.groups / 64]);
    }

    /// Checks the result: a wrong kernel has no time.
    pub async fn validate(&self, gpu: &Gpu) {
        let got: Vec<f32> = gpu.download_async(&self.to, self.from.len()).await.expect("the copy");
        assert!(got == self.from, "a copy that is none");
    }
}
