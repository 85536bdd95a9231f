//! Compiles kernel variants to pipelines, each once.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::guard::guarded;
use super::texts::TEXTS;
use super::{Binding, Dispatch, Kernel, KernelVariant, Requirements, Sharing};
use crate::device::bars::bars;
use crate::device::tuned::{Class, Pick, hash};
use crate::device::{DeviceFacts, Families, Family, Report, TuningCache, Verdict};
use crate::tensor::{Access, Error};

/// A pipeline and the layout of its bind groups.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    /// Bytes of the parameters. The remaining bytes of a dispatch belong to the second uniform.
    pub params_bytes: usize,
    pub requirements: Requirements,
}

/// The entry of one variant's pipeline.
#[derive(Default)]
struct Place {
    compiled: OnceLock<Compiled>,
    /// The lock of the thread that compiles the pipeline.
    compiling: Mutex<()>,
}

/// The lock is held during lookups, never during compilation.
type Places = Mutex<HashMap<PipelineKey, Arc<Place>>>;

/// A variant of a kernel, compiled for whole grids or for parts of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PipelineKey {
    pub variant: KernelVariant,
    /// True if the pipeline counts workgroups from the first one of a part
    /// ([`Kernel::of_part`](super::Kernel::of_part)).
    pub is_part: bool,
    /// The tensors that are read from buffers that are written as well.
    pub sharing: Sharing,
}

/// A function that changes the text of kernels of these families. Tests use it to simulate a driver
/// that miscompiles them.
pub(crate) type Rewrite = Arc<dyn Fn(Families, &str) -> String + Send + Sync>;

#[derive(Clone)]
struct Compiler {
    device: wgpu::Device,
    rewrite: Option<Rewrite>,
    /// The driver's compiled code from earlier runs of the application.
    cache: Option<wgpu::PipelineCache>,
}

struct Inner {
    compiler: Compiler,
    places: Arc<Places>,
    /// The bindings of the kernels whose calls had tensors in one buffer.
    bindings: Mutex<HashMap<KernelVariant, Arc<[Binding]>>>,
    /// Only the disabled families change.
    facts: Mutex<DeviceFacts>,
    /// The families of every requested pipeline.
    used: [AtomicU64; 2],
    /// The results of checks.
    verdicts: Mutex<BTreeMap<Family, Verdict>>,
    /// True if a refused kernel disables its family. Checks and measurements set it to false.
    falls_back: bool,
}

/// Locks a mutex, even if another thread panicked with it: no update under these locks is left
/// incomplete.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The compiled pipelines of a device, shared by every operator that is made from it. Clones are
/// cheap.
///
/// A pipeline is compiled and stored at the first call that needs it. Threads that record at the
/// same time only wait for each other if they need the same new pipeline.
///
/// On OpenGL, wgpu panics in a thread that waits too long for another thread. The limit is six
/// seconds, or one second on Windows. The library therefore lets only one thread at a time call
/// wgpu on OpenGL, whatever the device. The lock does not cover the application's calls of wgpu. On
/// OpenGL, submit, poll, create and drop buffers while no other thread records, compiles or uses
/// [`Gpu`](crate::Gpu).
///
/// The `prepare` methods of the operators compile before the first call. Some drivers compile a
/// pipeline only when it is first submitted. With lavapipe the first submission of a kernel takes
/// up to seconds, unless Mesa's cache on disk contains the kernel. `prepare` submits nothing, so it
/// cannot prevent this. [`WarmUp`](crate::WarmUp) can: submit its recording when the delay does no
/// harm. A call that needs several new pipelines compiles them on all cores.
#[derive(Clone)]
pub struct Pipelines(Arc<Inner>);

impl fmt::Debug for Pipelines {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("Pipelines")
            .field("adapter", &self.device().adapter_info().name)
            .finish_non_exhaustive()
    }
}

impl Pipelines {
    /// Creates an empty set of pipelines for `device`.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_facts(device, DeviceFacts::of(device))
    }

    /// Creates an empty set of pipelines for a `device` of `adapter`. Use it instead of
    /// [`new`](Self::new) to allow matrix units (see [`MatrixUnits`](crate::tuning::MatrixUnits)).
    ///
    /// Kernels use matrix units if the device has the features `EXPERIMENTAL_COOPERATIVE_MATRIX`,
    /// `SHADER_F16` and `SUBGROUP`. The adapter must list fragments of 16 × 16 or 8 × 8 that
    /// multiply f16 and accumulate in f32.
    ///
    /// ```no_run
    /// # async fn f(adapter: &wgpu::Adapter) -> Result<(), Box<dyn std::error::Error>> {
    /// use wgpu_attention::{Attention, Config, DType, Pipelines, wgpu};
    ///
    /// let config = Config::new(32, 128).dtype(DType::F16);
    /// let (features, limits) = config.required(adapter);
    /// let matrix = wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX & adapter.features();
    /// let (device, queue) = adapter
    ///     .request_device(&wgpu::DeviceDescriptor {
    ///         required_features: features | matrix,
    ///         required_limits: limits,
    ///         // SAFETY: wgpu's experimental features may have bugs; this application accepts that.
    ///         experimental_features: unsafe { wgpu::ExperimentalFeatures::enabled() },
    ///         ..Default::default()
    ///     })
    ///     .await?;
    /// let attention = Attention::with_pipelines(&Pipelines::with_adapter(&device, adapter), config)?;
    /// # Ok(()) }
    /// ```
    pub fn with_adapter(device: &wgpu::Device, adapter: &wgpu::Adapter) -> Self {
        Self::with_facts(device, DeviceFacts::of(device).with_adapter(device, adapter))
    }

    pub(crate) fn with_facts(device: &wgpu::Device, facts: DeviceFacts) -> Self {
        let compiler = Compiler { device: device.clone(), rewrite: None, cache: None };
        Self::with_compiler(compiler, Arc::default(), facts, true)
    }

    fn with_compiler(compiler: Compiler, places: Arc<Places>, facts: DeviceFacts, falls_back: bool) -> Self {
        Pipelines(Arc::new(Inner {
            compiler,
            places,
            bindings: Mutex::default(),
            facts: Mutex::new(facts),
            used: Default::default(),
            verdicts: Mutex::default(),
            falls_back,
        }))
    }

    /// Adds a pipeline cache, which an application stores in a file. With the results of an earlier
    /// process in `cache`, the driver compiles less. Call it first: the result has no pipelines
    /// yet, and earlier clones of `self` do not use `cache`.
    ///
    /// The device needs the feature `PIPELINE_CACHE`, which wgpu supports only on Vulkan. Most
    /// drivers for desktops have a built-in cache, and lavapipe stores nothing in `cache`. A cache
    /// of another device of the same `wgpu::Instance` leads to [`Error::Refused`] when a kernel is
    /// compiled.
    ///
    /// ```no_run
    /// # fn f(device: &wgpu::Device) -> Result<(), Box<dyn std::error::Error>> {
    /// use wgpu_attention::{Attention, Config, Pipelines, wgpu};
    ///
    /// let stored = std::fs::read("pipelines.bin").ok();
    /// let descriptor = wgpu::PipelineCacheDescriptor { label: None, data: stored.as_deref(), fallback: true };
    /// // SAFETY: this application alone writes the file, from `get_data` of a cache.
    /// let cache = unsafe { device.create_pipeline_cache(&descriptor) };
    /// let attention = Attention::with_pipelines(&Pipelines::new(device).pipeline_cache(&cache), Config::new(8, 64))?;
    /// // When all that is needed was compiled:
    /// if let Some(data) = cache.get_data() {
    ///     std::fs::write("pipelines.bin", data)?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn pipeline_cache(self, cache: &wgpu::PipelineCache) -> Self {
        let compiler = Compiler { cache: Some(cache.clone()), ..self.0.compiler.clone() };
        let cached = Self::with_compiler(compiler, Arc::default(), self.facts(), self.0.falls_back);
        *lock(&cached.0.verdicts) = lock(&self.0.verdicts).clone();
        cached
    }

    /// Creates an empty set of pipelines for the same device. `rewrite` changes the text of each
    /// kernel.
    #[cfg(feature = "inspect")]
    pub(crate) fn rewritten(&self, rewrite: Rewrite) -> Self {
        let compiler = Compiler { rewrite: Some(rewrite), ..self.0.compiler.clone() };
        Self::with_compiler(compiler, Arc::default(), self.facts(), true)
    }

    /// Creates an empty set of pipelines for the same plans.
    #[cfg(feature = "inspect")]
    pub(crate) fn emptied(&self) -> Self {
        Self::with_compiler(self.0.compiler.clone(), Arc::default(), self.facts(), false)
    }

    /// Shares the pipelines, for plans that do not use the families of `disabled`.
    pub(crate) fn without(&self, disabled: Families) -> Self {
        let facts = DeviceFacts { disabled, ..self.facts() };
        Self::with_compiler(self.0.compiler.clone(), self.0.places.clone(), facts, false)
    }

    /// Creates pipelines for plans that use `pick` for calls of `class`. They share the compiled
    /// pipelines if `shared`; otherwise the set is empty.
    pub(crate) fn with_pick(&self, class: Class, pick: Pick, shared: bool) -> Self {
        let facts = self.facts();
        let mut picks = facts.tuned.as_deref().cloned().unwrap_or_default();
        picks.insert(class, pick);
        let facts = DeviceFacts { tuned: Some(Arc::new(picks)), ..facts };
        let places = if shared { self.0.places.clone() } else { Arc::default() };
        Self::with_compiler(self.0.compiler.clone(), places, facts, false)
    }

    /// Stores `pick` for calls of `class`, and the pipelines that `compiled` compiled for it.
    pub(crate) fn adopt(&self, class: Class, pick: Pick, compiled: &Pipelines) {
        let theirs: Vec<_> =
            lock(&compiled.0.places).iter().map(|(key, place)| (key.clone(), place.clone())).collect();
        for (key, place) in theirs {
            lock(&self.0.places).entry(key).or_insert(place);
        }
        let mut facts = lock(&self.0.facts);
        let mut picks = facts.tuned.as_deref().cloned().unwrap_or_default();
        picks.insert(class, pick);
        facts.tuned = Some(Arc::new(picks));
    }

    /// Returns the measurements for this device, to store and to use in later runs. They come from
    /// [`tune`](Self::tune) or [`use_tuned`](Self::use_tuned).
    pub fn tuned(&self) -> TuningCache {
        TuningCache::of(self.tuned_key(), self.facts().tuned.as_deref())
    }

    /// Replaces the measurements that plans follow. Returns the number of classes of calls with a
    /// valid entry in `tuned`. Entries are valid for the same device, driver and version of the
    /// kernels. [`TuningCache::new`] removes all measurements.
    ///
    /// A call whose [`Scratch`](crate::Scratch) is too small for the measured plan follows the
    /// built-in rules. If necessary, it does not split keys.
    pub fn use_tuned(&self, tuned: &TuningCache) -> usize {
        let picks = tuned.picks(self.tuned_key());
        let count = picks.len();
        lock(&self.0.facts).tuned = (count > 0).then(|| Arc::new(picks));
        count
    }

    /// A hash of everything that a measurement depends on: the device, its driver, the backend and
    /// the kernels.
    fn tuned_key(&self) -> u64 {
        let info = self.device().adapter_info();
        let numbers = [info.vendor, info.device, info.subgroup_min_size, info.subgroup_max_size];
        let backend = format!("{:?}", info.backend);
        let texts = [&info.name, &info.driver, &info.driver_info, &backend, env!("CARGO_PKG_VERSION")];
        let device = texts.iter().map(|text| text.as_bytes()).chain([bytemuck::cast_slice(&numbers)]);
        hash(device.chain(TEXTS.iter().map(|text| text.as_bytes())))
    }

    /// The families of every pipeline that calls used.
    pub(crate) fn used(&self) -> Families {
        Families::from_words([0, 1].map(|n| self.0.used[n].load(Ordering::Relaxed)))
    }

    /// Replaces the results of earlier checks. Plans do not use the families that failed.
    pub(crate) fn settle(&self, verdicts: BTreeMap<Family, Verdict>) {
        let disabled =
            verdicts.iter().filter(|(_, verdict)| verdict.is_disabled()).map(|(family, _)| *family);
        let mut known = lock(&self.0.verdicts);
        lock(&self.0.facts).disabled = disabled.collect();
        *known = verdicts;
    }

    /// Returns the state of each family of kernels on this device. A family is barred by a list of
    /// drivers that it would crash, checked by [`check`](Self::check), or unchecked.
    pub fn report(&self) -> Report {
        let info = self.device().adapter_info();
        let disabled = self.facts().disabled;
        let found = lock(&self.0.verdicts);
        let verdict = |family: &Family| {
            let barred =
                || bars(&info).find(|bar| disabled.contains(*family) && bar.families.contains(family));
            let known = || barred().map(|bar| Verdict::Barred { what: bar.what, source: bar.source });
            found.get(family).cloned().or_else(known).unwrap_or(Verdict::Unchecked)
        };
        Report { findings: Family::ALL.iter().map(|family| (*family, verdict(family))).collect() }
    }

    /// Allows plans to use `family`, although it is barred or failed a check. Use it for
    /// measurements, and for drivers that were repaired after the list was written. Barred kernels
    /// can crash the process. A later [`check`](Self::check) checks the family.
    pub fn allow(&self, family: Family) {
        self.say(family, Verdict::Unchecked);
    }

    /// Disables `family`, independent of the result of [`check`](Self::check).
    pub fn avoid(&self, family: Family) {
        self.say(family, Verdict::Avoided);
    }

    fn say(&self, family: Family, verdict: Verdict) {
        let mut verdicts = lock(&self.0.verdicts);
        let mut facts = lock(&self.0.facts);
        facts.disabled =
            if verdict.is_disabled() { facts.disabled.with(family) } else { facts.disabled.without(family) };
        verdicts.insert(family, verdict);
    }

    /// The device of these pipelines.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.compiler.device
    }

    /// The number of pipelines compiled so far.
    pub fn compiled(&self) -> usize {
        self.variants().len()
    }

    /// Returns the bindings of a kernel. Composing its text takes long, so the result is stored.
    pub(crate) fn bindings_of(&self, variant: &KernelVariant) -> Arc<[Binding]> {
        let mut stored = lock(&self.0.bindings);
        stored.entry(variant.clone()).or_insert_with(|| variant.describe().bindings.into()).clone()
    }

    pub(crate) fn variants(&self) -> Vec<KernelVariant> {
        let places = lock(&self.0.places);
        let compiled = places.iter().filter(|(_, place)| place.compiled.get().is_some());
        compiled.map(|(key, _)| key.variant.clone()).collect()
    }

    /// Drops the compiled pipelines. Use it when an application has finished one kind of problem.
    /// Recorded calls keep their pipelines, and so do calls that a [`Scratch`](crate::Scratch) or
    /// an operator has bound.
    pub fn clear(&self) {
        lock(&self.0.places).clear();
        lock(&self.0.bindings).clear();
    }

    pub(crate) fn facts(&self) -> DeviceFacts {
        lock(&self.0.facts).clone()
    }

    /// Disables the first family of `variant` that other families can replace.
    fn disable_family_of(&self, variant: &KernelVariant, why: &str) {
        let disabled = self.facts().disabled;
        let replaced = |family: &Family| family.is_replaced() && !disabled.contains(*family);
        if let Some(family) = variant.families().iter().find(replaced) {
            self.say(family, Verdict::Wrong { why: format!("{}: {why}", variant.label()) });
        }
    }

    /// Runs `record`, which plans, compiles, then records. If an error disabled a family, `record`
    /// runs again and makes another plan.
    ///
    /// # Errors
    /// The compiler's error if no kernel replaces the refused one, or the error of `record`.
    pub(crate) fn with_fallbacks<T>(&self, mut record: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        let mut refused = None;
        loop {
            let before = self.facts().disabled;
            match (record(), refused.take()) {
                (Err(error), earlier) if self.facts().disabled != before => {
                    refused = if matches!(error, Error::Refused { .. }) { Some(error) } else { earlier };
                }
                (Err(Error::Disabled { .. }), Some(earlier)) => return Err(earlier),
                (result, _) => return result,
            }
        }
    }

    /// Refuses kernels of a disabled family that no other family replaces.
    pub(super) fn refuse_disabled(&self, dispatches: &[Dispatch]) -> Result<(), Error> {
        let disabled = lock(&self.0.facts).disabled.and(Families::IRREPLACEABLE);
        if disabled == Families::NONE {
            return Ok(());
        }
        match dispatches.iter().find_map(|call| call.variant.families().and(disabled).iter().next()) {
            Some(family) => Err(Error::Disabled { family }),
            None => Ok(()),
        }
    }

    /// The largest number of workgroups of a dispatch along an axis.
    pub(crate) fn max_workgroups(&self) -> u32 {
        lock(&self.0.facts).max_workgroups
    }

    /// True if the pipeline of `key` is compiled.
    pub(crate) fn has(&self, key: &PipelineKey) -> bool {
        lock(&self.0.places).get(key).is_some_and(|place| place.compiled.get().is_some())
    }

    /// Compiles these pipelines on all cores. It drops errors. The caller compiles each pipeline
    /// again that is missing, and returns the first error in the order of the dispatches.
    #[cfg(not(target_arch = "wasm32"))]
    pub(super) fn compile_together(&self, keys: Vec<PipelineKey>) {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(keys.len());
        // A check has a thread for each core already.
        if threads < 2 || !self.0.falls_back {
            return;
        }
        let waiting = Mutex::new(keys.into_iter());
        let work = || {
            loop {
                // A separate statement, so that the lock ends before the compiler begins.
                let next = lock(&waiting).next();
                let Some(key) = next else { return };
                let _ = self.compiled_of(&key);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                // If the system has no further thread, the others do its work.
                let _ = std::thread::Builder::new().spawn_scoped(scope, work);
            }
            work();
        });
    }

    /// Browsers have one thread.
    #[cfg(target_arch = "wasm32")]
    pub(super) fn compile_together(&self, _keys: Vec<PipelineKey>) {}

    /// Returns the pipeline of `key`, and compiles it at the first use. After an error the next use
    /// compiles again.
    pub(crate) fn get(&self, key: PipelineKey) -> Result<Compiled, Error> {
        for (used, word) in self.0.used.iter().zip(key.variant.families().words()) {
            used.fetch_or(word, Ordering::Relaxed);
        }
        let compiled = self.compiled_of(&key);
        if let Err(Error::Refused { description, .. }) = &compiled
            && self.0.falls_back
        {
            self.disable_family_of(&key.variant, description);
        }
        compiled
    }

    /// As [`get`](Self::get), for a pipeline that may not be used. An error disables nothing.
    fn compiled_of(&self, key: &PipelineKey) -> Result<Compiled, Error> {
        let place = lock(&self.0.places).entry(key.clone()).or_default().clone();
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let _compiling = lock(&place.compiling);
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let compiled = self.0.compiler.compile(key, &self.facts())?;
        Ok(place.compiled.get_or_init(|| compiled).clone())
    }
}

impl Compiler {
    fn compile(
        &self,
        PipelineKey { variant, is_part, sharing }: &PipelineKey,
        facts: &DeviceFacts,
    ) -> Result<Compiled, Error> {
        let (label, kernel) = (variant.label(), variant.describe());
        let kernel = if facts.f16 { kernel } else { kernel.without_f16().unwrap_or(kernel) };
        let kernel = kernel.with_sharing(label, sharing)?;
        let kernel = &if *is_part { kernel.of_part() } else { kernel };
        let most = [facts.max_invocations, facts.workgroup_memory, facts.max_storage_buffers];
        for ((what, needed, name), limit) in kernel.limits().into_iter().zip(most) {
            if needed > limit {
                return Err(Error::Limit { what, needed: needed.into(), limit: limit.into(), name });
            }
        }
        let rewritten = self.rewrite.as_ref().map(|rewrite| rewrite(variant.families(), &kernel.wgsl));
        let text = rewritten.as_ref().unwrap_or(&kernel.wgsl);
        guarded(&self.device, label, || {
            let layout = self.layout(label, kernel);
            // SAFETY: the text belongs to the crate. `mods` regenerates the text of a caller's mod
            // without pointers or bindings, with clamped indices and counted loops. The crate's
            // loops count to bounds that the host passes. Bounds that come from a buffer are
            // clamped to these. Its indices stay inside the views that the host has checked, and
            // its divisors are positive.
            let module = unsafe {
                self.device.create_shader_module_trusted(
                    wgpu::ShaderModuleDescriptor {
                        label: Some(label),
                        source: wgpu::ShaderSource::Wgsl(text.as_str().into()),
                    },
                    wgpu::ShaderRuntimeChecks::unchecked(),
                )
            };
            let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: Some(label),
                bind_group_layouts: &[Some(&layout)],
                immediate_size: 0,
            });
            let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
                label: Some(label),
                layout: Some(&pipeline_layout),
                module: &module,
                entry_point: Some("main"),
                compilation_options: wgpu::PipelineCompilationOptions {
                    constants: &[],
                    // Every kernel writes its workgroup memory before reading it.
                    zero_initialize_workgroup_memory: false,
                },
                cache: self.cache.as_ref(),
            });
            let requirements = Requirements::of_kernel(kernel);
            Compiled { pipeline, layout, params_bytes: kernel.params_bytes, requirements }
        })
    }

    fn layout(&self, label: &'static str, kernel: &Kernel) -> wgpu::BindGroupLayout {
        let entry = |binding: usize, ty| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        for (n, binding) in kernel.bindings.iter().enumerate().filter(|(_, b)| b.same_as.is_none()) {
            let read_only = binding.access == Access::Read && !binding.shared;
            let ty = match binding.uniform {
                Some(_) => wgpu::BufferBindingType::Uniform,
                None => wgpu::BufferBindingType::Storage { read_only },
            };
            entries.push(entry(n + 1, ty));
        }
        self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(label),
            entries: &entries,
        })
    }
}
