//! Kernel variants → compiled pipelines, each once.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::guard::guarded;
use super::texts::TEXTS;
use super::{Dispatch, Kernel, KernelVariant, Sharing};
use crate::device::bars::bars;
use crate::device::tuned::{Class, Pick, hash};
use crate::device::{DeviceFacts, Families, Family, Report, TuningCache, Verdict};
use crate::tensor::{Access, Error};

/// A pipeline and the layout its bind groups follow.
#[derive(Clone, Debug)]
pub(crate) struct Compiled {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    /// Of a dispatch's bytes, those of the parameters; what is left is of the second uniform.
    pub params_bytes: usize,
}

/// The place of one variant's pipeline.
#[derive(Default)]
struct Place {
    compiled: OnceLock<Compiled>,
    /// Held by the thread that compiles it.
    compiling: Mutex<()>,
}

/// Locked to find a place, never while something compiles.
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

/// Another text for a kernel of such families: a driver that compiles something else than it is
/// given.
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
    /// What may change of them is which kernels plans do without.
    facts: Mutex<DeviceFacts>,
    /// The families of every pipeline that was asked for.
    used: AtomicU64,
    /// What a check found.
    verdicts: Mutex<BTreeMap<Family, Verdict>>,
    /// True if a refused kernel disables its family. Checks and measurements set it to false.
    falls_back: bool,
}

/// What a lock holds, whether or not another thread panicked with it: nothing is left half done
/// under ours.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The compiled pipelines of a device, shared by every operator made from it. Clones are cheap.
///
/// A pipeline is compiled at the first call that needs it and kept. Threads that record at once
/// wait for each other only where they need the same new pipeline.
///
/// On OpenGL, wgpu panics in a thread that waits too long for another thread: six seconds, or one
/// second on Windows. The library therefore lets only one thread at a time call wgpu on OpenGL,
/// whatever the device. The lock does not cover the application's own calls of wgpu. There, submit,
/// poll, create and drop buffers while no other thread records, compiles or uses
/// [`Gpu`](crate::Gpu).
///
/// The `prepare` methods of the operators compile before the first call. Some drivers put their
/// compiler off until a pipeline is submitted for the first time. With lavapipe the first
/// submission of a kernel takes up to seconds, prepared or not, unless Mesa's cache on disk has it.
/// `prepare` submits nothing, so it cannot prevent that: submit each call once where the wait does
/// no harm, on tensors of any content.
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
    /// No pipelines yet, for `device`.
    pub fn new(device: &wgpu::Device) -> Self {
        Self::with_facts(device, DeviceFacts::of(device))
    }

    /// As [`new`](Self::new), for a `device` of `adapter`: kernels may then use its matrix units,
    /// if the device has the features `EXPERIMENTAL_COOPERATIVE_MATRIX`, `SHADER_F16` and
    /// `SUBGROUP` and the adapter lists fragments of 16 × 16 or 8 × 8 that multiply f16 and sum in
    /// f32 (see [`MatrixUnits`](crate::tuning::MatrixUnits)).
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
            facts: Mutex::new(facts),
            used: AtomicU64::default(),
            verdicts: Mutex::default(),
            falls_back,
        }))
    }

    /// Pipelines that the driver compiles by way of `cache`, which an application keeps in a file:
    /// with what an earlier process has compiled, the driver compiles less. Call it before anything
    /// else; the result has no pipelines yet, and earlier clones of `self` do not use `cache`.
    ///
    /// The device needs the feature `PIPELINE_CACHE`, which wgpu has on Vulkan alone. Most drivers
    /// for desktops have caches of their own, and lavapipe puts nothing into this one.
    /// A cache of another device of the same `wgpu::Instance` is an [`Error::Refused`] where
    /// something is compiled.
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

    /// None yet, for the same device, from texts that `rewrite` changed.
    #[cfg(feature = "inspect")]
    pub(crate) fn rewritten(&self, rewrite: Rewrite) -> Self {
        let compiler = Compiler { rewrite: Some(rewrite), ..self.0.compiler.clone() };
        Self::with_compiler(compiler, Arc::default(), self.facts(), true)
    }

    /// None yet, for the same plans.
    #[cfg(feature = "inspect")]
    pub(crate) fn emptied(&self) -> Self {
        Self::with_compiler(self.0.compiler.clone(), Arc::default(), self.facts(), false)
    }

    /// The same pipelines for plans that do without `aside`.
    pub(crate) fn without(&self, aside: Families) -> Self {
        let facts = DeviceFacts { aside, ..self.facts() };
        Self::with_compiler(self.0.compiler.clone(), self.0.places.clone(), facts, false)
    }

    /// For plans that follow `pick` for calls of `class`: none yet, or the same pipelines if
    /// `shared`.
    pub(crate) fn with_pick(&self, class: Class, pick: Pick, shared: bool) -> Self {
        let facts = self.facts();
        let mut picks = facts.tuned.as_deref().cloned().unwrap_or_default();
        picks.insert(class, pick);
        let facts = DeviceFacts { tuned: Some(Arc::new(picks)), ..facts };
        let places = if shared { self.0.places.clone() } else { Arc::default() };
        Self::with_compiler(self.0.compiler.clone(), places, facts, false)
    }

    /// Keeps `pick` for calls of `class`, and what `compiled` has compiled for it.
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

    /// What was measured on this device, by [`tune`](Self::tune) or where
    /// [`use_tuned`](Self::use_tuned) had it from: to keep, and to use the next time.
    pub fn tuned(&self) -> TuningCache {
        TuningCache::of(self.tuned_key(), self.facts().tuned.as_deref())
    }

    /// Lets plans follow what was measured before, instead of what they followed until now; returns
    /// for how many classes of calls `tuned` has an entry that holds for this device, its driver
    /// and this version of the kernels. [`TuningCache::new`] takes back all that was measured.
    ///
    /// A call whose [`Scratch`](crate::Scratch) has no room for what was measured is computed by
    /// the rules, without splitting keys if need be.
    pub fn use_tuned(&self, tuned: &TuningCache) -> usize {
        let picks = tuned.picks(self.tuned_key());
        let count = picks.len();
        lock(&self.0.facts).tuned = (count > 0).then(|| Arc::new(picks));
        count
    }

    /// What a measurement holds for: the device, its driver, the backend, and the kernels.
    fn tuned_key(&self) -> u64 {
        let info = self.device().adapter_info();
        let numbers = [info.vendor, info.device, info.subgroup_min_size, info.subgroup_max_size];
        let backend = format!("{:?}", info.backend);
        let texts = [&info.name, &info.driver, &info.driver_info, &backend, env!("CARGO_PKG_VERSION")];
        let device = texts.iter().map(|text| text.as_bytes()).chain([bytemuck::cast_slice(&numbers)]);
        hash(device.chain(TEXTS.iter().map(|text| text.as_bytes())))
    }

    /// The families of every pipeline that calls took from these.
    pub(crate) fn used(&self) -> Families {
        Families::from_bits(self.0.used.load(Ordering::Relaxed))
    }

    /// What a check found takes the place of what earlier ones did; plans do without what it put
    /// aside.
    pub(crate) fn settle(&self, verdicts: BTreeMap<Family, Verdict>) {
        let aside = verdicts.iter().filter(|(_, verdict)| verdict.is_aside()).map(|(family, _)| *family);
        let mut known = lock(&self.0.verdicts);
        lock(&self.0.facts).aside = aside.collect();
        *known = verdicts;
    }

    /// What is known of each family of kernels on this device: barred by a list of drivers that
    /// they would crash, checked by
    /// [`check`](Self::check), or neither.
    pub fn report(&self) -> Report {
        let info = self.device().adapter_info();
        let aside = self.facts().aside;
        let found = lock(&self.0.verdicts);
        let verdict = |family: &Family| {
            let barred = || bars(&info).find(|bar| aside.contains(*family) && bar.families.contains(family));
            let known = || barred().map(|bar| Verdict::Barred { what: bar.what, source: bar.source });
            found.get(family).cloned().or_else(known).unwrap_or(Verdict::Unchecked)
        };
        Report { findings: Family::ALL.iter().map(|family| (*family, verdict(family))).collect() }
    }

    /// Lets plans use `family` although it is barred or was found wrong: for measurements, and for
    /// drivers that the list does not know to be mended. What is barred can end the process. A
    /// later [`check`](Self::check) checks it.
    pub fn allow(&self, family: Family) {
        self.say(family, Verdict::Unchecked);
    }

    /// Lets plans do without `family`, whatever a [`check`](Self::check) says.
    pub fn avoid(&self, family: Family) {
        self.say(family, Verdict::Avoided);
    }

    fn say(&self, family: Family, verdict: Verdict) {
        let mut verdicts = lock(&self.0.verdicts);
        let mut facts = lock(&self.0.facts);
        facts.aside = if verdict.is_aside() { facts.aside.with(family) } else { facts.aside.without(family) };
        verdicts.insert(family, verdict);
    }

    /// The device these belong to.
    pub fn device(&self) -> &wgpu::Device {
        &self.0.compiler.device
    }

    /// Pipelines compiled so far.
    pub fn compiled(&self) -> usize {
        self.variants().len()
    }

    pub(crate) fn variants(&self) -> Vec<KernelVariant> {
        let places = lock(&self.0.places);
        let compiled = places.iter().filter(|(_, place)| place.compiled.get().is_some());
        compiled.map(|(key, _)| key.variant.clone()).collect()
    }

    /// Drops what was compiled: for applications that are done with one kind of problem. What has
    /// been recorded or is bound, in a [`Scratch`](crate::Scratch) or an operator, keeps its
    /// pipeline.
    pub fn clear(&self) {
        lock(&self.0.places).clear();
    }

    pub(crate) fn facts(&self) -> DeviceFacts {
        lock(&self.0.facts).clone()
    }

    /// Disables the first family of `variant` that others replace.
    fn disable_family_of(&self, variant: &KernelVariant, why: &str) {
        let aside = self.facts().aside;
        let replaced = |family: &Family| family.is_replaced() && !aside.contains(*family);
        if let Some(family) = variant.families().iter().find(replaced) {
            self.say(family, Verdict::Wrong { why: format!("{}: {why}", variant.label()) });
        }
    }

    /// Runs `record`, which plans, compiles, then records. After an error that disabled a family,
    /// `record` plans again.
    ///
    /// # Errors
    /// The compiler's refusal if nothing replaces the kernel, or the error of `record`.
    pub(crate) fn with_fallbacks<T>(&self, mut record: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        let mut refused = None;
        loop {
            let before = self.facts().aside;
            match (record(), refused.take()) {
                (Err(error), earlier) if self.facts().aside != before => {
                    refused = if matches!(error, Error::Refused { .. }) { Some(error) } else { earlier };
                }
                (Err(Error::PutAside { .. }), Some(earlier)) => return Err(earlier),
                (result, _) => return result,
            }
        }
    }

    /// Refuses kernels of a family that is put aside and that nothing replaces.
    pub(super) fn refuse_put_aside(&self, dispatches: &[Dispatch]) -> Result<(), Error> {
        let aside = lock(&self.0.facts).aside.and(Families::IRREPLACEABLE);
        if aside == Families::NONE {
            return Ok(());
        }
        match dispatches.iter().find_map(|call| call.variant.families().and(aside).iter().next()) {
            Some(family) => Err(Error::PutAside { family }),
            None => Ok(()),
        }
    }

    /// The largest number of workgroups of a dispatch along an axis.
    pub(crate) fn max_workgroups(&self) -> u32 {
        lock(&self.0.facts).max_workgroups
    }

    /// The pipeline of `key`, compiled now if this is its first use. After an error the next use
    /// tries again.
    pub(crate) fn get(&self, key: PipelineKey) -> Result<Compiled, Error> {
        self.0.used.fetch_or(key.variant.families().bits(), Ordering::Relaxed);
        let place = lock(&self.0.places).entry(key.clone()).or_default().clone();
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let _compiling = lock(&place.compiling);
        if let Some(compiled) = place.compiled.get() {
            return Ok(compiled.clone());
        }
        let compiled = self.0.compiler.compile(&key, &self.facts());
        if let Err(Error::Refused { description, .. }) = &compiled
            && self.0.falls_back
        {
            self.disable_family_of(&key.variant, description);
        }
        let compiled = compiled?;
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
        let kernel = kernel.with_sharing(sharing)?;
        let kernel = &if *is_part { kernel.of_part() } else { kernel };
        // wgpu checks neither of these against the limits.
        let limits = [
            (
                "invocations per workgroup",
                kernel.invocations,
                facts.max_invocations,
                "max_compute_invocations_per_workgroup",
            ),
            (
                "workgroup memory",
                kernel.workgroup_memory,
                facts.workgroup_memory,
                "max_compute_workgroup_storage_size",
            ),
            (
                "storage buffers of a kernel",
                kernel.storage_buffers(),
                facts.max_storage_buffers,
                "max_storage_buffers_per_shader_stage",
            ),
        ];
        for (what, needed, limit, name) in limits {
            if needed > limit {
                return Err(Error::Limit { what, needed: needed.into(), limit: limit.into(), name });
            }
        }
        let rewritten = self.rewrite.as_ref().map(|rewrite| rewrite(variant.families(), &kernel.wgsl));
        let text = rewritten.as_ref().unwrap_or(&kernel.wgsl);
        guarded(&self.device, label, || {
            let layout = self.layout(label, kernel);
            // SAFETY: the text is the crate's own, and what it has of a caller's mod was written
            // anew by `mods`: without pointers or bindings, indices clamped, loops counted. The
            // crate's loops count to bounds that the host passes, or that are clamped to those
            // where they come from a buffer; its indices stay inside the views the host has
            // checked, its divisors are positive.
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
                    // Every kernel writes its workgroup memory before it reads it.
                    zero_initialize_workgroup_memory: false,
                },
                cache: self.cache.as_ref(),
            });
            Compiled { pipeline, layout, params_bytes: kernel.params_bytes }
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
