//! Mesa's compiler for AMD GPUs, without a GPU: its null device of a family compiles, and reports what it made.

use std::ffi::{CStr, c_char};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ash::vk;

/// The GPUs compiled for, oldest first.
pub const FAMILIES: [Family; 4] = [
    Family { name: "vega10", matrix_units: false },
    Family { name: "navi21", matrix_units: false },
    Family { name: "navi31", matrix_units: true },
    Family { name: "gfx1200", matrix_units: true },
];

/// Invocations of a subgroup, unless it is told otherwise.
pub const SUBGROUP: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    pub name: &'static str,
    pub matrix_units: bool,
}

/// What the driver says of a compiled kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    pub subgroup: u64,
    pub vgprs: u64,
    /// Vector registers in memory.
    pub spills: u64,
    /// Scalar registers in lanes of vector registers.
    pub scalar_spills: u64,
    /// Bytes of memory of a subgroup's own: spills, and arrays that are indexed.
    pub scratch: u64,
    pub lds: u64,
    /// Subgroups that a SIMD holds at once.
    pub occupancy: u64,
    pub code: u64,
    /// Cycles, by the compiler's own estimate; loops count once or as often as it guesses.
    pub latency: u64,
    pub inverse_throughput: u64,
}

impl Statistics {
    /// The numbers, in the order of the members.
    fn line(&self) -> String {
        format!("{self:?}").chars().filter(|c| c.is_ascii_digit() || *c == ',').collect()
    }

    fn of_line(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?;
        let [
            subgroup,
            vgprs,
            spills,
            scalar_spills,
            scratch,
            lds,
            occupancy,
            code,
            latency,
            inverse_throughput,
        ] = numbers[..]
        else {
            return None;
        };
        Some(Statistics {
            subgroup,
            vgprs,
            spills,
            scalar_spills,
            scratch,
            lds,
            occupancy,
            code,
            latency,
            inverse_throughput,
        })
    }
}

/// A module to compile, and the storage buffers it has beside the uniform.
#[derive(Clone, Debug)]
pub struct Job {
    pub module: PathBuf,
    pub buffers: usize,
}

/// Compiles every job for `family` in a process of its own, and in a further one what is left if the compiler ends the first.
pub fn check(runner: &Path, family: Family, jobs: &[Job]) -> Vec<Result<Statistics, String>> {
    let mut results = Vec::new();
    while results.len() < jobs.len() {
        let before = results.len();
        if let Err(error) = check_some(runner, family, &jobs[before..], &mut results) {
            results.push(Err(format!("the compiler's process ended: {error}")));
        }
    }
    results
}

fn check_some(
    runner: &Path,
    family: Family,
    jobs: &[Job],
    results: &mut Vec<Result<Statistics, String>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut child = Command::new(runner)
        .arg(std::env::current_exe()?)
        .arg("radv")
        .env("RADV_FORCE_FAMILY", family.name)
        .env("MESA_SHADER_CACHE_DISABLE", "true")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // Where Mesa says that there is no GPU.
        .stderr(Stdio::null())
        .spawn()?;
    let mut list = child.stdin.take().ok_or("no standard input")?;
    let mut answers = BufReader::new(child.stdout.take().ok_or("no standard output")?).lines();
    for job in jobs {
        let asked = writeln!(list, "{} {}", job.buffers, job.module.display());
        let answer = asked.ok().and_then(|()| answers.next());
        let Some(answer) = answer else { return Err(child.wait()?.to_string().into()) };
        let answer = answer?;
        results.push(match Statistics::of_line(&answer) {
            Some(statistics) => Ok(statistics),
            None => Err(answer),
        });
    }
    drop(list);
    child.wait()?;
    Ok(())
}

/// The other side of [`check`]: answers each line of standard input with a line.
pub fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let compiler = Compiler::new()?;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lines() {
        let line = line?;
        let (buffers, path) = line.split_once(' ').ok_or("a number and a path")?;
        let bytes = std::fs::read(path)?;
        let words: Vec<u32> =
            bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        match compiler.compile(&words, buffers.parse()?) {
            Ok(statistics) => writeln!(out, "{}", statistics.line())?,
            Err(error) => writeln!(out, "{}", error.to_string().replace('\n', " "))?,
        }
        out.flush()?;
    }
    Ok(())
}

struct Compiler {
    _entry: ash::Entry,
    _instance: ash::Instance,
    device: ash::Device,
    statistics: ash::khr::pipeline_executable_properties::Device,
}

fn text(s: &[c_char]) -> String {
    let bytes: Vec<u8> = s.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Compiler {
    fn new() -> Result<Self, Box<dyn std::error::Error>> {
        // SAFETY: a loader of Vulkan's, which does what it is specified to; this process does nothing else with it.
        unsafe {
            let entry = ash::Entry::load()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let about = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&about, None)?;
            let gpu = *instance.enumerate_physical_devices()?.first().ok_or("no device")?;
            let name = text(&instance.get_physical_device_properties(gpu).device_name);
            let family = std::env::var("RADV_FORCE_FAMILY")?;
            if !name.to_lowercase().contains(&family) {
                return Err(format!("the device is {name}, not {family}").into());
            }
            let listed = instance.enumerate_device_extension_properties(gpu)?;
            let has =
                |name: &CStr| listed.iter().any(|e| text(&e.extension_name).as_bytes() == name.to_bytes());
            let wanted = [
                ash::khr::pipeline_executable_properties::NAME,
                ash::khr::cooperative_matrix::NAME,
                ash::ext::robustness2::NAME,
            ];
            let extensions: Vec<_> = wanted.into_iter().filter(|name| has(name)).map(CStr::as_ptr).collect();
            let queues =
                [vk::DeviceQueueCreateInfo::default().queue_family_index(0).queue_priorities(&[1.0])];
            let mut of_1_1 = vk::PhysicalDeviceVulkan11Features::default();
            let mut of_1_2 = vk::PhysicalDeviceVulkan12Features::default();
            let mut of_1_3 = vk::PhysicalDeviceVulkan13Features::default();
            let mut executable = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default();
            let mut matrix = vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default();
            // wgpu enables robustness wherever there is any, modules without checks or not.
            let mut robust = vk::PhysicalDeviceRobustness2FeaturesEXT::default();
            let mut features = vk::PhysicalDeviceFeatures2::default()
                .push_next(&mut of_1_1)
                .push_next(&mut of_1_2)
                .push_next(&mut of_1_3)
                .push_next(&mut executable)
                .push_next(&mut robust);
            if has(ash::khr::cooperative_matrix::NAME) {
                features = features.push_next(&mut matrix);
            }
            instance.get_physical_device_features2(gpu, &mut features);
            let about = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&extensions)
                .push_next(&mut features);
            let device = instance.create_device(gpu, &about, None)?;
            let statistics = ash::khr::pipeline_executable_properties::Device::new(&instance, &device);
            Ok(Compiler { _entry: entry, _instance: instance, device, statistics })
        }
    }

    fn compile(&self, spirv: &[u32], buffers: usize) -> Result<Statistics, Box<dyn std::error::Error>> {
        let device = &self.device;
        let binding = |n: usize| {
            let ty =
                if n == 0 { vk::DescriptorType::UNIFORM_BUFFER } else { vk::DescriptorType::STORAGE_BUFFER };
            vk::DescriptorSetLayoutBinding::default()
                .binding(n as u32)
                .descriptor_type(ty)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let bindings: Vec<_> = (0..=buffers).map(binding).collect();
        // SAFETY: every object is used with the device it was made of, and destroyed once, after its last use. The
        // module is valid: it has passed the validator or its fault is what this is to find.
        unsafe {
            let about = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
            let sets = [device.create_descriptor_set_layout(&about, None)?];
            let layout = device
                .create_pipeline_layout(&vk::PipelineLayoutCreateInfo::default().set_layouts(&sets), None)?;
            let module =
                device.create_shader_module(&vk::ShaderModuleCreateInfo::default().code(spirv), None)?;
            let stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main");
            let about = vk::ComputePipelineCreateInfo::default()
                .flags(vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR)
                .stage(stage)
                .layout(layout);
            let made = device.create_compute_pipelines(vk::PipelineCache::null(), &[about], None);
            let statistics = match made {
                Ok(pipelines) => {
                    let statistics = self.read(pipelines[0]);
                    device.destroy_pipeline(pipelines[0], None);
                    statistics
                }
                Err((_, error)) => Err(error.into()),
            };
            device.destroy_shader_module(module, None);
            device.destroy_pipeline_layout(layout, None);
            device.destroy_descriptor_set_layout(sets[0], None);
            statistics
        }
    }

    /// # Safety
    /// `pipeline` is one of this device.
    unsafe fn read(&self, pipeline: vk::Pipeline) -> Result<Statistics, Box<dyn std::error::Error>> {
        // SAFETY: as promised.
        let (executables, read) = unsafe {
            let about = vk::PipelineInfoKHR::default().pipeline(pipeline);
            let executables = self.statistics.get_pipeline_executable_properties(&about)?;
            let about = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
            (executables, self.statistics.get_pipeline_executable_statistics(&about)?)
        };
        let value = |name: &str| {
            let found = read.iter().find(|s| text(&s.name) == name);
            let found = found.ok_or_else(|| format!("the driver does not tell {name}"))?;
            // SAFETY: the format says which member it is.
            match found.format {
                vk::PipelineExecutableStatisticFormatKHR::UINT64 => Ok(unsafe { found.value.u64 }),
                _ => Err(format!("{name} is no unsigned number")),
            }
        };
        let [executable] = executables.as_slice() else { return Err("one executable expected".into()) };
        Ok(Statistics {
            subgroup: u64::from(executable.subgroup_size),
            vgprs: value("VGPRs")?,
            spills: value("Spilled VGPRs")?,
            scalar_spills: value("Spilled SGPRs")?,
            scratch: value("Scratch size")?,
            lds: value("LDS size")?,
            occupancy: value("Subgroups per SIMD")?,
            code: value("Code size")?,
            latency: value("Latency")?,
            inverse_throughput: value("Inverse Throughput")?,
        })
    }
}
