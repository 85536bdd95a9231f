//! A Vulkan layer that records the compute pipelines of a program. `scripts/compiled` uses it.
//!
//! For each pipeline it writes a JSON file with the driver's statistics and texts. The module goes
//! into a file with the same stem. `CAPTURE_OUT` names the folder. The records show a program's
//! kernels as they are on its device, with its features, specialisation constants and subgroups.
//! With `CAPTURE_UNCHECKED` the device gets no robust access to buffers.

use std::collections::HashMap;
use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use ash::khr::pipeline_executable_properties::Device as Statistics;
use ash::vk::{self, Handle};
use serde_json::{Map, Value, json};

/// The structure that the loader puts into the chain of a `CreateInfo`, by `vk_layer.h`.
#[repr(C)]
struct LayerInfo<Link> {
    ty: vk::StructureType,
    next: *const c_void,
    function: i32,
    link: *mut Link,
}

#[repr(C)]
struct InstanceLink {
    next: *mut InstanceLink,
    get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    get_physical_device_proc_addr: *const c_void,
}

#[repr(C)]
struct DeviceLink {
    next: *mut DeviceLink,
    get_instance_proc_addr: vk::PFN_vkGetInstanceProcAddr,
    get_device_proc_addr: vk::PFN_vkGetDeviceProcAddr,
}

#[repr(C)]
pub struct NegotiateLayerInterface {
    ty: i32,
    next: *mut c_void,
    version: u32,
    get_instance_proc_addr: Option<vk::PFN_vkGetInstanceProcAddr>,
    get_device_proc_addr: Option<vk::PFN_vkGetDeviceProcAddr>,
    get_physical_device_proc_addr: *const c_void,
}

/// The value of `function` for a structure with a link.
const LINK_INFO: i32 = 0;
const INSTANCE_INFO: vk::StructureType = vk::StructureType::from_raw(47);
const DEVICE_INFO: vk::StructureType = vk::StructureType::from_raw(48);

#[derive(Clone)]
struct Device {
    device: ash::Device,
    /// The driver's description of itself, or an empty string.
    driver: String,
    next: vk::PFN_vkGetDeviceProcAddr,
    /// `None` if the driver has no statistics.
    statistics: Option<Statistics>,
}

#[derive(Default)]
struct State {
    instances: HashMap<usize, (ash::Instance, vk::PFN_vkGetInstanceProcAddr)>,
    devices: HashMap<usize, Device>,
    modules: HashMap<u64, Vec<u8>>,
    pipelines: usize,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the loader's key: the first word of every object with functions of an instance or a
/// device.
///
/// # Safety
/// `handle` is null or such an object.
unsafe fn key(handle: impl Handle) -> usize {
    let object = handle.as_raw() as *const usize;
    // SAFETY: the caller guarantees it.
    if object.is_null() { 0 } else { unsafe { *object } }
}

/// Returns the first structure of type `ty` in a chain.
///
/// # Safety
/// `next` begins a chain. Its structures of type `ty` are `T`.
unsafe fn chained<T>(
    mut next: *const c_void,
    ty: vk::StructureType,
    is_it: fn(&T) -> bool,
) -> Option<*mut T> {
    while !next.is_null() {
        // SAFETY: every structure of a chain begins with these members.
        let base = unsafe { &*next.cast::<vk::BaseInStructure>() };
        // SAFETY: the caller guarantees it.
        if base.s_type == ty && is_it(unsafe { &*next.cast::<T>() }) {
            return Some(next.cast_mut().cast());
        }
        next = base.p_next.cast();
    }
    None
}

/// # Safety
/// Vulkan's loader calls it.
#[unsafe(no_mangle)]
pub unsafe extern "system" fn vkNegotiateLoaderLayerInterfaceVersion(
    interface: *mut NegotiateLayerInterface,
) -> vk::Result {
    // SAFETY: the loader passes its structure.
    let interface = unsafe { &mut *interface };
    interface.version = interface.version.min(2);
    interface.get_instance_proc_addr = Some(get_instance_proc_addr);
    interface.get_device_proc_addr = Some(get_device_proc_addr);
    interface.get_physical_device_proc_addr = std::ptr::null();
    vk::Result::SUCCESS
}

macro_rules! function {
    ($function:expr, $ty:ty) => {{
        let function: $ty = $function;
        // SAFETY: the caller requests the function by name, and knows its type.
        Some(unsafe { std::mem::transmute::<$ty, unsafe extern "system" fn()>(function) })
    }};
}

/// Returns the functions of this layer, by name.
fn own(name: &[u8]) -> vk::PFN_vkVoidFunction {
    match name {
        b"vkGetInstanceProcAddr" => function!(get_instance_proc_addr, vk::PFN_vkGetInstanceProcAddr),
        b"vkGetDeviceProcAddr" => function!(get_device_proc_addr, vk::PFN_vkGetDeviceProcAddr),
        b"vkCreateInstance" => function!(create_instance, vk::PFN_vkCreateInstance),
        b"vkCreateDevice" => function!(create_device, vk::PFN_vkCreateDevice),
        b"vkCreateShaderModule" => function!(create_shader_module, vk::PFN_vkCreateShaderModule),
        b"vkCreateComputePipelines" => function!(create_compute_pipelines, vk::PFN_vkCreateComputePipelines),
        _ => None,
    }
}

unsafe extern "system" fn get_instance_proc_addr(
    instance: vk::Instance,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: a name is a string.
    if let Some(function) = own(unsafe { CStr::from_ptr(name) }.to_bytes()) {
        return Some(function);
    }
    // SAFETY: the loader created the instance.
    let next = state().instances.get(&unsafe { key(instance) }).map(|(_, next)| *next)?;
    // SAFETY: the same call, to the next layer.
    unsafe { next(instance, name) }
}

unsafe extern "system" fn get_device_proc_addr(
    device: vk::Device,
    name: *const c_char,
) -> vk::PFN_vkVoidFunction {
    // SAFETY: a name is a string.
    if let Some(function) = own(unsafe { CStr::from_ptr(name) }.to_bytes()) {
        return Some(function);
    }
    // SAFETY: the loader created the device.
    let next = state().devices.get(&unsafe { key(device) }).map(|device| device.next)?;
    // SAFETY: the same call, to the next layer.
    unsafe { next(device, name) }
}

unsafe extern "system" fn create_instance(
    about: *const vk::InstanceCreateInfo,
    allocator: *const vk::AllocationCallbacks,
    instance: *mut vk::Instance,
) -> vk::Result {
    // SAFETY: the loader passes a link for each layer, which the layer removes from the chain. It
    // also passes the place for the instance.
    unsafe {
        let is_it = |info: &LayerInfo<InstanceLink>| info.function == LINK_INFO;
        let Some(info) = chained((*about).p_next, INSTANCE_INFO, is_it) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let next = (*(*info).link).get_instance_proc_addr;
        (*info).link = (*(*info).link).next;
        let Some(create) = next(vk::Instance::null(), c"vkCreateInstance".as_ptr()) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let create = std::mem::transmute::<unsafe extern "system" fn(), vk::PFN_vkCreateInstance>(create);
        let result = create(about, allocator, instance);
        if result == vk::Result::SUCCESS {
            let all = ash::Instance::load(&ash::StaticFn { get_instance_proc_addr: next }, *instance);
            state().instances.insert(key(*instance), (all, next));
        }
        result
    }
}

unsafe extern "system" fn create_device(
    physical: vk::PhysicalDevice,
    about: *const vk::DeviceCreateInfo,
    allocator: *const vk::AllocationCallbacks,
    device: *mut vk::Device,
) -> vk::Result {
    const STATISTICS: &CStr = ash::khr::pipeline_executable_properties::NAME;
    // SAFETY: as for an instance. The structures that are added to the chain live as long as the
    // call.
    unsafe {
        let is_it = |info: &LayerInfo<DeviceLink>| info.function == LINK_INFO;
        let Some(info) = chained((*about).p_next, DEVICE_INFO, is_it) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let (next_of_instance, next) =
            ((*(*info).link).get_instance_proc_addr, (*(*info).link).get_device_proc_addr);
        (*info).link = (*(*info).link).next;
        let Some((instance, _)) = state().instances.get(&key(physical)).cloned() else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let Some(create) = next_of_instance(instance.handle(), c"vkCreateDevice".as_ptr()) else {
            return vk::Result::ERROR_INITIALIZATION_FAILED;
        };
        let create = std::mem::transmute::<unsafe extern "system" fn(), vk::PFN_vkCreateDevice>(create);
        let listed = instance.enumerate_device_extension_properties(physical).unwrap_or_default();
        let has = listed.iter().any(|one| one.extension_name_as_c_str() == Ok(STATISTICS));
        let mut asked = *about;
        let names = match asked.enabled_extension_count {
            0 => &[],
            count => std::slice::from_raw_parts(asked.pp_enabled_extension_names, count as usize),
        };
        let mut names = names.to_vec();
        let mut feature = vk::PhysicalDevicePipelineExecutablePropertiesFeaturesKHR::default()
            .pipeline_executable_info(true);
        if has && !names.iter().any(|name| CStr::from_ptr(*name) == STATISTICS) {
            names.push(STATISTICS.as_ptr());
            feature.p_next = asked.p_next.cast_mut();
            asked.p_next = (&raw const feature).cast();
        }
        asked.enabled_extension_count = names.len() as u32;
        asked.pp_enabled_extension_names = names.as_ptr();
        let mut features = asked.p_enabled_features.as_ref().copied();
        if std::env::var_os("CAPTURE_UNCHECKED").is_some() {
            if let Some(features) = &mut features {
                features.robust_buffer_access = vk::FALSE;
                asked.p_enabled_features = features;
            }
            let any = |_: &vk::PhysicalDeviceFeatures2| true;
            if let Some(all) = chained(asked.p_next, vk::StructureType::PHYSICAL_DEVICE_FEATURES_2, any) {
                (*all).features.robust_buffer_access = vk::FALSE;
            }
            let ty = vk::StructureType::PHYSICAL_DEVICE_ROBUSTNESS_2_FEATURES_EXT;
            let any = |_: &vk::PhysicalDeviceRobustness2FeaturesEXT| true;
            if let Some(more) = chained(asked.p_next, ty, any) {
                (*more).robust_buffer_access2 = vk::FALSE;
            }
        }
        let result = create(physical, &asked, allocator, device);
        if result == vk::Result::SUCCESS {
            let own = ash::InstanceFnV1_0 { get_device_proc_addr: next, ..instance.fp_v1_0().clone() };
            let (of_1_1, of_1_3) = (instance.fp_v1_1().clone(), instance.fp_v1_3().clone());
            let instance = ash::Instance::from_parts_1_3(instance.handle(), own, of_1_1, of_1_3);
            let of_device = ash::Device::load(instance.fp_v1_0(), *device);
            let statistics = has.then(|| Statistics::new(&instance, &of_device));
            let driver = driver(&instance, physical);
            state().devices.insert(key(*device), Device { device: of_device, driver, next, statistics });
        }
        result
    }
}

/// # Safety
/// `physical` belongs to `instance`.
unsafe fn driver(instance: &ash::Instance, physical: vk::PhysicalDevice) -> String {
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut driver);
    // SAFETY: the caller guarantees it, and every driver here supports Vulkan 1.2 or later.
    unsafe { instance.get_physical_device_properties2(physical, &mut properties) };
    driver.driver_info_as_c_str().map_or_else(|_| String::new(), |name| name.to_string_lossy().into())
}

unsafe extern "system" fn create_shader_module(
    device: vk::Device,
    about: *const vk::ShaderModuleCreateInfo,
    allocator: *const vk::AllocationCallbacks,
    module: *mut vk::ShaderModule,
) -> vk::Result {
    // SAFETY: the layer passes the caller's device and arguments on.
    unsafe {
        let Some(next) = state().devices.get(&key(device)).cloned() else {
            return vk::Result::ERROR_DEVICE_LOST;
        };
        let result = (next.device.fp_v1_0().create_shader_module)(device, about, allocator, module);
        if result == vk::Result::SUCCESS {
            let code = std::slice::from_raw_parts((*about).p_code.cast::<u8>(), (*about).code_size);
            state().modules.insert((*module).as_raw(), code.to_vec());
        }
        result
    }
}

unsafe extern "system" fn create_compute_pipelines(
    device: vk::Device,
    _: vk::PipelineCache,
    count: u32,
    infos: *const vk::ComputePipelineCreateInfo,
    allocator: *const vk::AllocationCallbacks,
    pipelines: *mut vk::Pipeline,
) -> vk::Result {
    // SAFETY: the layer passes the caller's device and arguments on. The pipelines exist if the
    // result is success.
    unsafe {
        let Some(next) = state().devices.get(&key(device)).cloned() else {
            return vk::Result::ERROR_DEVICE_LOST;
        };
        let mut infos = std::slice::from_raw_parts(infos, count as usize).to_vec();
        if next.statistics.is_some() {
            for info in &mut infos {
                info.flags |= vk::PipelineCreateFlags::CAPTURE_STATISTICS_KHR
                    | vk::PipelineCreateFlags::CAPTURE_INTERNAL_REPRESENTATIONS_KHR;
            }
        }
        let create = next.device.fp_v1_0().create_compute_pipelines;
        // Pipelines from a cache have no texts, and the driver cannot write pipelines with texts
        // into a cache.
        let cache = vk::PipelineCache::null();
        let result = create(device, cache, count, infos.as_ptr(), allocator, pipelines);
        if let (vk::Result::SUCCESS, Some(statistics), Some(folder)) =
            (result, &next.statistics, std::env::var_os("CAPTURE_OUT"))
        {
            for (n, info) in infos.iter().enumerate() {
                if let Err(error) =
                    write(Path::new(&folder), &next.driver, statistics, info, *pipelines.add(n))
                {
                    eprintln!("capture: {error}");
                }
            }
        }
        result
    }
}

/// # Safety
/// `pipeline` was created from `info`, on the device of `statistics`.
unsafe fn write(
    folder: &Path,
    driver: &str,
    statistics: &Statistics,
    info: &vk::ComputePipelineCreateInfo,
    pipeline: vk::Pipeline,
) -> Result<(), Box<dyn Error>> {
    let number = {
        let mut state = state();
        state.pipelines += 1;
        state.pipelines
    };
    // Browsers' engines and scripts may have more than one process.
    let stem = folder.join(format!("{}-{number:03}", std::process::id()));
    // SAFETY: the caller guarantees it.
    let (numbers, texts) = unsafe { (numbers(statistics, pipeline)?, texts(statistics, pipeline)?) };
    let about = vk::PipelineInfoKHR::default().pipeline(pipeline);
    // SAFETY: the caller guarantees it.
    let executables = unsafe { statistics.get_pipeline_executable_properties(&about)? };
    let all = json!({
        "driver": driver,
        "subgroups": executables.iter().map(|one| one.subgroup_size).collect::<Vec<_>>(),
        "statistics": numbers,
        "texts": texts,
    });
    std::fs::write(stem.with_extension("json"), serde_json::to_string_pretty(&all)?)?;
    if let Some(code) = state().modules.get(&info.stage.module.as_raw()) {
        std::fs::write(stem.with_extension("spv"), code)?;
    }
    Ok(())
}

/// Returns the statistics of a pipeline's first executable that are counts.
///
/// # Safety
/// `pipeline` belongs to the device of `statistics`, and was created with statistics.
unsafe fn numbers(
    statistics: &Statistics,
    pipeline: vk::Pipeline,
) -> Result<Map<String, Value>, Box<dyn Error>> {
    let about = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
    let mut numbers = Map::new();
    // SAFETY: the caller guarantees it.
    for one in unsafe { statistics.get_pipeline_executable_statistics(&about)? } {
        if one.format == vk::PipelineExecutableStatisticFormatKHR::UINT64 {
            // SAFETY: the format tells which member is valid.
            let number = unsafe { one.value.u64 };
            numbers.insert(one.name_as_c_str()?.to_string_lossy().into(), number.into());
        }
    }
    Ok(numbers)
}

/// Returns the internal representations of a pipeline's first executable.
///
/// # Safety
/// `pipeline` belongs to the device of `statistics`, and was created with statistics.
unsafe fn texts(
    statistics: &Statistics,
    pipeline: vk::Pipeline,
) -> Result<Map<String, Value>, Box<dyn Error>> {
    let about = vk::PipelineExecutableInfoKHR::default().pipeline(pipeline);
    // SAFETY: the caller guarantees it.
    let mut all = unsafe { statistics.get_pipeline_executable_internal_representations(&about)? };
    // ash queries the lengths. A second call writes texts of these lengths.
    let mut texts: Vec<Vec<u8>> = all.iter().map(|one| vec![0; one.data_size]).collect();
    for (one, text) in all.iter_mut().zip(&mut texts) {
        one.p_data = text.as_mut_ptr().cast();
    }
    let mut count = all.len() as u32;
    let read = statistics.fp().get_pipeline_executable_internal_representations_khr;
    if count > 0 {
        // SAFETY: `count` elements, each with as many bytes as its `data_size`.
        unsafe { read(statistics.device(), &about, &mut count, all.as_mut_ptr()).result()? };
    }
    let mut named = Map::new();
    for (one, text) in all.iter().zip(&texts) {
        let text = String::from_utf8_lossy(text).trim_end_matches('\0').to_owned();
        named.insert(one.name_as_c_str()?.to_string_lossy().into(), text.into());
    }
    Ok(named)
}
