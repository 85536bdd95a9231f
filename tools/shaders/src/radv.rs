//! Mesa's compiler for AMD GPUs, without a GPU: its null device of a family compiles, and reports what it made.

use std::ffi::CStr;
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
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
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
        // What is no JSON is why the process ends.
        results.push(serde_json::from_str(&answer).unwrap_or(Err(answer)));
    }
    drop(list);
    child.wait()?;
    Ok(())
}

/// The other side of [`check`]: answers each line of standard input with a result, in a line of JSON.
pub fn serve() -> Result<(), Box<dyn std::error::Error>> {
    let compiler = Compiler::new()?;
    let mut out = std::io::stdout();
    for line in std::io::stdin().lines() {
        let line = line?;
        let (buffers, path) = line.split_once(' ').ok_or("a number and a path")?;
        let words = ash::util::read_spv(&mut std::fs::File::open(path)?)?;
        let answer = compiler.compile(&words, buffers.parse()?).map_err(|error| error.to_string());
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
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

impl Compiler {
    fn new() -> Result<Self, Box<dyn std::error::Error>> {
        // SAFETY: a loader of Vulkan's, which does what it is specified to; this process does nothing else with it.
        unsafe {
            let entry = ash::Entry::load()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let about = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&about, None)?;
            let gpu = *instance.enumerate_physical_devices()?.first().ok_or("no device")?;
            let properties = instance.get_physical_device_properties(gpu);
            let name = properties.device_name_as_c_str()?.to_string_lossy();
            let family = std::env::var("RADV_FORCE_FAMILY")?;
            if !name.to_lowercase().contains(&family) {
                return Err(format!("the device is {name}, not {family}").into());
            }
            let listed = instance.enumerate_device_extension_properties(gpu)?;
            let has = |name: &CStr| listed.iter().any(|e| e.extension_name_as_c_str() == Ok(name));
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
        let value = |name: &CStr| {
            let found = read.iter().find(|s| s.name_as_c_str() == Ok(name));
            let found = found.ok_or_else(|| format!("the driver does not tell {name:?}"))?;
            match found.format {
                // SAFETY: the format says which member it is.
                vk::PipelineExecutableStatisticFormatKHR::UINT64 => Ok(unsafe { found.value.u64 }),
                _ => Err(format!("{name:?} is no unsigned number")),
            }
        };
        let [executable] = executables.as_slice() else { return Err("one executable expected".into()) };
        Ok(Statistics {
            subgroup: u64::from(executable.subgroup_size),
            vgprs: value(c"VGPRs")?,
            spills: value(c"Spilled VGPRs")?,
            scalar_spills: value(c"Spilled SGPRs")?,
            scratch: value(c"Scratch size")?,
            lds: value(c"LDS size")?,
            occupancy: value(c"Subgroups per SIMD")?,
            code: value(c"Code size")?,
            latency: value(c"Latency")?,
            inverse_throughput: value(c"Inverse Throughput")?,
        })
    }
}
