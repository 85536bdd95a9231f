//! Compiles with Mesa's drivers, each for a GPU that is not present, and reads their statistics.

use std::ffi::CStr;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ash::vk;

use crate::gpus::{self, Gpu, Names, Sign};
use crate::tile::{self, Facts, Tile};
use crate::{assembly, mad_share};

type Error = Box<dyn std::error::Error>;

/// A driver's statistics of a compiled kernel. A number that the driver does not report is absent.
#[derive(Clone, Copy, Debug, PartialEq, serde::Deserialize, serde::Serialize)]
pub struct Statistics {
    /// Invocations of a subgroup.
    pub subgroup: u64,
    /// Vector registers.
    pub registers: u64,
    /// Vector registers that are spilled to memory.
    pub spills: u64,
    /// Bytes of private memory of an invocation (RADV: of a subgroup): spills, and arrays that are
    /// indexed.
    pub memory: Option<u64>,
    /// Subgroups (Honeykrisp: invocations) that a core, or the driver's part of a core, holds at
    /// once.
    pub occupancy: u64,
    pub instructions: u64,
    /// The compiler's estimate. It counts a loop once, or as often as it guesses.
    pub cycles: Option<u64>,
    /// Scalar registers that are spilled to lanes of vector registers.
    pub scalar_spills: Option<u64>,
    pub lds: Option<u64>,
    pub code: Option<u64>,
    /// Multiply-adds per hundred instructions of inner loops, if the text was read.
    pub mad_share: Option<f64>,
    /// The work of a full tile of keys, if it was requested and found.
    pub tile: Option<Tile>,
}

/// A module to compile, and the number of its storage buffers without the uniform.
#[derive(Clone, Debug)]
pub struct Job {
    pub module: PathBuf,
    pub buffers: usize,
    /// True if a second uniform is bound behind the storage buffers.
    pub mods: bool,
    /// True to read the driver's text, which takes longer.
    pub text: bool,
    /// The work of a tile, if it is to be found in the text.
    pub tile: Option<Facts>,
}

/// The program that compiles for a GPU. It reads jobs from standard input.
struct Child {
    child: std::process::Child,
    list: std::process::ChildStdin,
    answers: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

/// The program's line once it has a device.
const READY: &str = "ready";

impl Child {
    /// `runner` starts programs with the GPU's driver.
    fn start(runner: &Path, gpu: Gpu) -> Result<Self, Error> {
        let mut child = Command::new(runner)
            .arg(std::env::current_exe()?)
            .args(["mesa", gpu.name])
            .envs(gpu.variable)
            .env("MESA_SHADER_CACHE_DISABLE", "true")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // drm-shim prints requests that it does not answer.
            .stderr(Stdio::null())
            .spawn()?;
        let list = child.stdin.take().ok_or("no standard input")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no standard output")?).lines();
        let mut child = Child { child, list, answers };
        match child.answers.next() {
            Some(line) if line.as_ref().is_ok_and(|line| line == READY) => Ok(child),
            // The reason why the program ends.
            Some(line) => Err(line?.into()),
            None => Err(child.child.wait()?.to_string().into()),
        }
    }

    /// Returns `None` if the program has ended.
    fn ask(&mut self, job: &Job) -> Option<Result<Statistics, String>> {
        let tile = serde_json::to_string(&job.tile).ok()?;
        let Job { buffers, mods, text, .. } = job;
        writeln!(self.list, "{buffers} {mods} {text} {tile} {}", job.module.display()).ok()?;
        let answer = self.answers.next()?.ok()?;
        // A line that is not JSON is the reason why the program ends.
        Some(serde_json::from_str(&answer).unwrap_or(Err(answer)))
    }

    fn end(mut self) -> std::io::Result<std::process::ExitStatus> {
        drop(self.list);
        self.child.wait()
    }
}

/// Checks that the driver opens a device of `gpu`. The error gives the reason.
pub fn opens(runner: &Path, gpu: Gpu) -> Result<(), String> {
    let child = Child::start(runner, gpu).map_err(|error| error.to_string())?;
    child.end().map(drop).map_err(|error| error.to_string())
}

/// Compiles every job for `gpu` in a separate process. If the compiler ends the process, a further
/// process compiles the remaining jobs.
pub fn check(runner: &Path, gpu: Gpu, jobs: &[Job]) -> Vec<Result<Statistics, String>> {
    let mut results = Vec::new();
    while results.len() < jobs.len() {
        let ended = match Child::start(runner, gpu) {
            Ok(mut child) => {
                results.extend(jobs[results.len()..].iter().map_while(|job| child.ask(job)));
                child.end().map_or_else(|error| error.to_string(), |status| status.to_string())
            }
            Err(error) => error.to_string(),
        };
        if results.len() < jobs.len() {
            results.push(Err(format!("the compiler's process ended: {ended}")));
        }
    }
    results
}

/// The other side of [`check`]: it answers each line of standard input with a result, in a line of
/// JSON.
pub fn serve(gpu: &str) -> Result<(), Error> {
    let compiler = Compiler::new(gpus::find(gpu).ok_or("no such GPU")?)?;
    let mut out = std::io::stdout();
    writeln!(out, "{READY}")?;
    out.flush()?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let mut parts = line.splitn(5, ' ');
        let mut part = || parts.next().ok_or("a number, whether mods, whether text, a tile, and a path");
        let (buffers, mods, text) = (part()?.parse()?, part()?.parse()?, part()?.parse()?);
        let (tile, path) = (serde_json::from_str(part()?)?, part()?);
        let words = ash::util::read_spv(&mut std::fs::File::open(path)?)?;
        let answer = compiler.compile(&words, buffers, mods, text, tile).map_err(|error| error.to_string());
        writeln!(out, "{}", serde_json::to_string(&answer)?)?;
        out.flush()?;
    }
    Ok(())
}

struct Compiler {
    gpu: Gpu,
    _entry: ash::Entry,
    _instance: ash::Instance,
    device: ash::Device,
    statistics: ash::khr::pipeline_executable_properties::Device,
}

impl Compiler {
    fn new(gpu: Gpu) -> Result<Self, Error> {
        // SAFETY: Vulkan's loader works as specified, and this process does nothing else with it.
        unsafe {
            let entry = ash::Entry::load()?;
            let application = vk::ApplicationInfo::default().api_version(vk::API_VERSION_1_3);
            let about = vk::InstanceCreateInfo::default().application_info(&application);
            let instance = entry.create_instance(&about, None)?;
            let device = *instance.enumerate_physical_devices()?.first().ok_or("no device")?;
            let mut of_device = vk::PhysicalDeviceIDProperties::default();
            let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut of_device);
            instance.get_physical_device_properties2(device, &mut properties);
            let name = properties.properties.device_name_as_c_str()?.to_string_lossy().into_owned();
            let is_it = match gpu.sign {
                Sign::Name(part) => name.to_lowercase().contains(&part.to_lowercase()),
                Sign::Uuid(first) => of_device.device_uuid[0] == first,
            };
            if !is_it {
                return Err(format!("the device is {name}, not {}", gpu.name).into());
            }
            let listed = instance.enumerate_device_extension_properties(device)?;
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
            // wgpu enables robustness wherever it is available, even for modules without checks.
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
            instance.get_physical_device_features2(device, &mut features);
            let about = vk::DeviceCreateInfo::default()
                .queue_create_infos(&queues)
                .enabled_extension_names(&extensions)
                .push_next(&mut features);
            let device = instance.create_device(device, &about, None)?;
            let statistics = ash::khr::pipeline_executable_properties::Device::new(&instance, &device);
            Ok(Compiler { gpu, _entry: entry, _instance: instance, device, statistics })
        }
    }

    fn compile(
        &self,
        spirv: &[u32],
        buffers: usize,
        mods: bool,
        text: bool,
        tile: Option<Facts>,
    ) -> Result<Statistics, Error> {
        let device = &self.device;
        let binding = |n: usize| {
            let uniform = n == 0 || n > buffers;
            let ty =
                if uniform { vk::DescriptorType::UNIFORM_BUFFER } else { vk::DescriptorType::STORAGE_BUFFER };
            vk::DescriptorSetLayoutBinding::default()
                .binding(n as u32)
                .descriptor_type(ty)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let bindings: Vec<_> = (0..=buffers + usize::from(mods)).map(binding).collect();
        // SAFETY: every object is used with the device that created it, and is destroyed once,
        // after its last use. The module is valid: it has passed the validator, or this test is to
        // find its fault.
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
            let mut flags = vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR;
            if text {
                flags |= vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
            }
            let about = vk::ComputePipelineCreateInfo::default().flags(flags).stage(stage).layout(layout);
            let made = device.create_compute_pipelines(vk::PipelineCache::null(), &[about], None);
            let statistics = match made {
                Ok(pipelines) => {
                    let statistics = self.read(pipelines[0], text, tile);
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
    /// `pipeline` belongs to this device. If `text` is set, it was created with its internal
    /// representations.
    unsafe fn read(
        &self,
        pipeline: vk::Pipeline,
        text: bool,
        tile: Option<Facts>,
    ) -> Result<Statistics, Error> {
        // SAFETY: the caller guarantees it.
        let (executables, read) = unsafe {
            let about = vk::PipelineInfoKHR::default().pipeline(pipeline);
            let executables = self.statistics.get_pipeline_executable_properties(&about)?;
            let about = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
            (executables, self.statistics.get_pipeline_executable_statistics(&about)?)
        };
        let value = |name: &str| {
            let is_it = |s: &&vk::PipelineExecutableStatisticKHR| {
                s.name_as_c_str().is_ok_and(|n| n.to_bytes() == name.as_bytes())
            };
            let found =
                read.iter().find(is_it).ok_or_else(|| format!("the driver does not tell {name:?}"))?;
            match found.format {
                // SAFETY: the format tells which member is valid.
                vk::PipelineExecutableStatisticFormatKHR::UINT64 => Ok(unsafe { found.value.u64 }),
                _ => Err(format!("{name:?} is no unsigned number")),
            }
        };
        let if_any = |name: Option<&str>| name.map(value).transpose();
        let [executable] = executables.as_slice() else { return Err("one executable expected".into()) };
        let names: Names = self.gpu.driver.names();
        let blocks = match names.text {
            // SAFETY: the caller guarantees it.
            Some(name) if text => assembly::blocks(self.gpu.driver, &unsafe { self.text(pipeline, name) }?),
            _ => Vec::new(),
        };
        let subgroup = u64::from(executable.subgroup_size);
        Ok(Statistics {
            subgroup,
            registers: value(names.registers)?,
            spills: value(names.spills)?,
            memory: if_any(names.memory)?,
            occupancy: value(names.occupancy)?,
            instructions: value(names.instructions)?,
            cycles: if_any(names.cycles)?,
            scalar_spills: if_any(names.scalar_spills)?,
            lds: if_any(names.lds)?,
            code: if_any(names.code)?,
            mad_share: mad_share::of(&blocks),
            tile: tile.and_then(|facts| tile::count(&blocks, &facts, subgroup)),
        })
    }

    /// Returns an internal representation.
    ///
    /// # Safety
    /// `pipeline` belongs to this device, and was created with its internal representations.
    unsafe fn text(&self, pipeline: vk::Pipeline, name: &str) -> Result<String, Error> {
        let about = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
        // SAFETY: the caller guarantees it.
        let mut all = unsafe { self.statistics.get_pipeline_executable_internal_representations(&about)? };
        // ash queries the lengths. A second call writes texts of these lengths.
        let mut texts: Vec<Vec<u8>> = all.iter().map(|one| vec![0; one.data_size]).collect();
        for (one, text) in all.iter_mut().zip(&mut texts) {
            one.p_data = text.as_mut_ptr().cast();
        }
        let mut count = all.len() as u32;
        let read = self.statistics.fp().get_pipeline_executable_internal_representations_khr;
        // SAFETY: `count` elements, each with as many bytes as its `data_size`.
        unsafe { read(self.device.handle(), &about, &mut count, all.as_mut_ptr()).result()? };
        let is_it = |one: &vk::PipelineExecutableInternalRepresentationKHR| {
            one.name_as_c_str().is_ok_and(|n| n.to_bytes() == name.as_bytes())
        };
        let number = all.iter().position(is_it).ok_or_else(|| format!("the driver has no text {name:?}"))?;
        Ok(String::from_utf8_lossy(&texts[number]).into_owned())
    }
}
