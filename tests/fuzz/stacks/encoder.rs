//! Stacks of encoder layers, forward and backward.

use wgpu_attention::layers::{EncoderBackward, EncoderForward};
use wgpu_attention::reference::compare::{EPSILON_F32, Tolerance};
use wgpu_attention::reference::{Options, Real};
use wgpu_attention::{DType, reference};

use super::{Data, HostLayer, Layer, Part, Stack, judge_moved, moves};
use crate::arena::{BYTES, Buf, Window, view};
use crate::call::{faults, float, largest};
use crate::case::widened;
use crate::choices::Choices;
use crate::gradients::at;
use crate::layer_options::LayerOptions;
use crate::masks::MaskSpec;
use crate::operands::{record, recorded, refuses};
use crate::world::{Outcome, World, refused};

/// One call of an encoder.
#[derive(Clone, Debug)]
struct EncoderSpec {
    stack: Stack,
    x: Window,
    out: Window,
    kept: Option<Window>,
    maps: Option<Window>,
    mask: MaskSpec,
}

impl EncoderSpec {
    fn new(f: &mut Choices, c: &mut Choices) -> Self {
        let mut stack = Stack::new(f, c, 1);
        let (batch, length) = (c.between(1, 2), c.between(1, 6));
        let LayerOptions { heads, dtype, out_features, add_zero_attn, .. } = stack.attention;
        let rows = [batch, 1, length, out_features];
        let layers = stack.layers.len();
        let kept = [(layers - usize::from(stack.final_norm.is_none())) * batch, 1, length, out_features];
        let appended = usize::from(stack.layers[0].appended.is_some()) + usize::from(add_zero_attn);
        let of_map = [layers * batch, if f.one_in(2) { 1 } else { heads }, length, length + appended];
        let [keeps, weighs, masked] = [(); 3].map(|()| f.one_in(3));
        let shape = stack.attention.shape(batch, length, length, 0);
        if c.one_in(30) {
            stack.layers.truncate(1);
        }
        EncoderSpec {
            stack,
            x: Window::input(c, dtype, rows, false),
            out: at(c, (Buf::OutA, 0), dtype, rows, false),
            kept: (keeps && kept[0] > 0).then(|| at(c, (Buf::OutB, 0), dtype, kept, false)),
            maps: weighs.then(|| at(c, (Buf::OutC, 0), DType::F32, of_map, false)),
            mask: if masked { MaskSpec::new(f, c, &shape) } else { MaskSpec::default() },
        }
    }

    fn spoil(&mut self, c: &mut Choices) {
        match c.below(8) {
            0 | 1 => self.stack.spoil(c),
            2 => self.mask.spoil(c),
            3 => self.kept.iter_mut().chain(&mut self.maps).for_each(|w| w.spoil(c)),
            4 | 5 => self.x.spoil(c),
            _ => self.out.spoil(c),
        }
    }

    fn call<'a>(&self, buffers: &'a [wgpu::Buffer]) -> EncoderForward<'a> {
        EncoderForward::new(view(buffers, &self.x), view(buffers, &self.out))
            .mask(self.mask.device(buffers))
            .hidden(self.kept.map(|w| view(buffers, &w)))
            .weights(self.maps.map(|w| view(buffers, &w)))
    }

    /// Returns all tensors of a call.
    fn windows(&mut self) -> Vec<Window> {
        let stack = self.stack.windows().into_iter().map(|w| *w);
        let own = [Some(self.x), Some(self.out), self.kept, self.maps].into_iter().flatten();
        stack.chain(own).chain(self.mask.windows().map(|w| *w)).collect()
    }

    fn is_tame(&mut self, bytes: &[Vec<u8>]) -> bool {
        self.stack.is_tame() && self.x.is_tame() && self.mask.is_tame(bytes)
    }

    /// Returns the output, the saved outputs of layers, and the weights that the call wants.
    fn reference<R: Real>(&self, data: &mut Data) -> Result<Vec<Vec<R>>, String> {
        let rules = self.mask.rules(data.bytes);
        let options = Options::new().mask(rules.host()).weights(true);
        let [batch, _, length, _] = self.x.shape;
        let x = data.of::<R>(&self.x);
        let got = self.stack.on_host::<R, _>(data, |layers, last| {
            let layers: Vec<_> = layers.iter().map(HostLayer::encoder).collect();
            reference::encoder(&x, [batch, length], &self.stack.config(), &layers, last, &options)
                .map_err(refuses)
        })?;
        let mut hidden = got.hidden.concat();
        hidden.truncate(self.kept.map_or(hidden.len(), |w| w.count()));
        let mut weights = got.weights.concat();
        let heads = self.stack.attention.heads;
        if let Some(maps) = self.maps.filter(|maps| maps.shape[1] < heads) {
            let pairs = maps.shape[2] * maps.shape[3];
            let entries = weights.len() / (heads * pairs);
            weights = reference::average_heads(&weights, entries, heads).map_err(refuses)?;
        }
        Ok(vec![got.out, hidden, weights])
    }
}

pub fn encoder(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = EncoderSpec::new(f, c);
    for _ in 0..faults(c) {
        spec.spoil(c);
    }
    *said = format!("{spec:?}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.encoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    let call = spec.call(&buffers);
    let size = operator.scratch_size(&call);
    let all = spec.windows();
    let writes: Vec<_> = [Some(spec.out), spec.kept, spec.maps].into_iter().flatten().collect();
    let tame = spec.is_tame(&world.arena.before) && writes.iter().all(Window::is_watched);
    let record = record!(operator, forward, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let (naive, want) = (spec.reference::<f32>(&mut plain())?, spec.reference::<f64>(&mut plain())?);
        let moved = moves(bytes, &want, |data| spec.reference(data))?;
        let most = largest(&want[0]).max(largest(&want[1]));
        let results =
            [("out", Some(spec.out), most), ("hidden", spec.kept, most), ("weights", spec.maps, 1.0)];
        for (n, (what, window, magnitude)) in results.into_iter().enumerate() {
            let Some(window) = window else { continue };
            let naive = widened(&naive[n], window.dtype);
            let own = Tolerance::from_naive(&naive, &want[n], magnitude, EPSILON_F32);
            judge_moved(what, world, &window, (&want[n], own), moved[n])?;
        }
    }
    Ok(outcome)
}

/// Places of gradients, one after the other.
struct Room {
    buffers: Vec<Buf>,
    bytes: usize,
}

impl Room {
    /// Returns a place for an F32 tensor like `window`, if it is wanted and there is room.
    fn place(&mut self, c: &mut Choices, window: Option<Window>) -> Option<Window> {
        let window = window.filter(|_| c.one_in(2))?;
        let mut place = Window::new(c, Buf::OutB, DType::F32, window.shape, false);
        let reach: usize = (0..4).map(|a| (place.shape[a] - 1) * place.strides[a]).sum();
        place.offset %= 16;
        let bytes = 4 * (place.offset + reach + 1);
        if self.bytes + bytes > BYTES {
            self.buffers.pop();
            self.bytes = 0;
        }
        place.buf = *self.buffers.last()?;
        place.offset += self.bytes / 4;
        self.bytes = (self.bytes + bytes).next_multiple_of(256);
        Some(place)
    }

    fn part(&mut self, c: &mut Choices, part: &Part) -> Part {
        Part { weight: self.place(c, part.weight), bias: self.place(c, part.bias) }
    }

    fn layer(&mut self, c: &mut Choices, layer: &Layer) -> Layer {
        let appended = layer.appended.and_then(|[key, value]| {
            let pair = [self.place(c, Some(key)), self.place(c, Some(value))];
            let [Some(key), Some(value)] = pair else { return None };
            Some([key, value])
        });
        Layer {
            attentions: layer
                .attentions
                .iter()
                .map(|parts| parts.each_ref().map(|part| self.part(c, part)))
                .collect(),
            appended,
            up: self.part(c, &layer.up),
            gate: layer.gate.map(|part| self.part(c, &part)),
            down: self.part(c, &layer.down),
            norms: layer.norms.iter().map(|part| self.part(c, part)).collect(),
        }
    }
}

/// Returns the gradients of x and of a stack, with parts in the order of [`Layer::parts`].
fn flat<R: Real>(got: reference::EncoderGradients<R>) -> Vec<[Option<Vec<R>>; 2]> {
    let mut all = vec![[Some(got.d_x), None]];
    for layer in got.layers {
        let reference::MultiHeadGradients { query, key, value, out, d_bias_kv, .. } = layer.attention;
        let reference::FeedForwardGradients { up, gate, down, .. } = layer.feed_forward;
        all.extend([query, key, value, out, up, down].map(|l| [Some(l.d_weight), l.d_bias]));
        all.extend(gate.map(|l| [Some(l.d_weight), l.d_bias]));
        all.extend(layer.norms.map(|norm| [Some(norm.d_weight), Some(norm.d_bias)]));
        all.extend(d_bias_kv.map(|pair| pair.map(Some)));
    }
    all.extend(got.final_norm.map(|norm| [Some(norm.d_weight), Some(norm.d_bias)]));
    all
}

impl Layer {
    /// Returns the gradients that are judged, in the order of [`flat`]. `appends` tells if the
    /// layer has an appended key. The gradients of queries' and keys' weights are left out. They
    /// are sums of differences that may be rounding alone, and 0 for rows with one key.
    /// `stacks::backward` and `layer_backward` judge them with terms of ordinary size.
    fn judged(&self, appends: bool) -> Vec<[Option<Window>; 2]> {
        let parts =
            self.attentions.iter().flat_map(|[_, _, value, out]| [None, None, Some(value), Some(out)]);
        let parts = parts.chain([&self.up, &self.down].map(Some));
        let parts = parts.chain(self.gate.as_ref().map(Some)).chain(self.norms.iter().map(Some));
        let windows = |part: Option<&Part>| part.map_or([None; 2], |part| [part.weight, part.bias]);
        let mut all: Vec<_> = parts.map(windows).collect();
        if appends {
            all.push([None, self.appended.map(|[_, value]| value)]);
        }
        all
    }
}

pub fn encoder_backward(
    world: &mut World,
    f: &mut Choices,
    c: &mut Choices,
    said: &mut String,
) -> Result<Outcome, String> {
    let mut spec = EncoderSpec::new(f, c);
    spec.maps = None;
    let rows = spec.x.shape;
    let mut d_out = Window::input(c, spec.stack.attention.dtype, rows, false);
    let of_x = float(f);
    let of_weights = f.one_in(2);
    let mut d_x = (!of_weights || f.one_in(2)).then(|| at(c, (Buf::OutA, BYTES / 2), of_x, rows, false));
    let mut room = Room { buffers: vec![Buf::OutC, Buf::OutB], bytes: 0 };
    if spec.kept.is_some() {
        room.buffers.pop();
    }
    let mut gradients: Vec<Layer> = match of_weights {
        true => spec.stack.layers.iter().map(|layer| room.layer(c, layer)).collect(),
        false => Vec::new(),
    };
    let d_final = spec.stack.final_norm.filter(|_| of_weights).map(|part| room.part(c, &part));
    let accumulates = c.one_in(6);
    for _ in 0..faults(c) {
        match c.below(6) {
            0 | 1 => spec.spoil(c),
            2 => d_out.spoil(c),
            3 => d_x.iter_mut().for_each(|w| w.spoil(c)),
            4 => gradients.truncate(1),
            _ => {
                let mut all: Vec<_> = gradients.iter_mut().flat_map(Layer::windows).collect();
                if !all.is_empty() {
                    let n = c.below(all.len());
                    all[n].spoil(c);
                }
            }
        }
    }
    *said = format!("{spec:?}, {d_out:?} to {d_x:?}, {gradients:?}, {d_final:?}, accumulates {accumulates}");
    let buffers = world.arena.buffers.clone();
    let operator = match spec.stack.encoder(world, &buffers) {
        Ok(operator) => operator,
        Err(e) => return world.works(&mut world.scratch()).map(|()| refused(&e)),
    };
    // No input holds the layers' outputs. So the call recomputes them if results are judged.
    let computed = spec.kept.is_none();
    let d_layers: Vec<_> = gradients.iter().map(|layer| layer.gradients(&buffers)).collect();
    let call = EncoderBackward::new(spec.call(&buffers), view(&buffers, &d_out))
        .d_x(d_x.map(|w| view(&buffers, &w)))
        .d_layers(&d_layers)
        .d_final_norm(d_final.map(|part| part.norm_gradients(&buffers)).unwrap_or_default())
        .accumulate(accumulates);
    let size = operator.backward_scratch_size(&call);
    let of_layers = gradients.iter_mut().flat_map(Layer::windows).map(|w| *w);
    let mut writes: Vec<Window> = d_x.into_iter().chain(of_layers).collect();
    writes.extend(d_final.iter().flat_map(|part| [part.weight, part.bias]).flatten());
    let mut all = spec.windows();
    all.extend(writes.iter().chain([&d_out]));
    let tame = computed
        && !accumulates
        && spec.is_tame(&world.arena.before)
        && d_out.is_tame()
        && writes.iter().all(Window::is_watched);
    let record = record!(operator, backward, &call);
    let outcome = recorded(world, c, size, (&all, &writes, tame), record)?;
    if matches!(outcome, Outcome::Judged) {
        /// Returns the gradients of all weights and of x, with their windows.
        fn truth<R: Real>(
            spec: &EncoderSpec,
            d_out: &Window,
            data: &mut Data,
        ) -> Result<Vec<[Option<Vec<R>>; 2]>, String> {
            let rules = spec.mask.rules(data.bytes);
            let options = Options::new().mask(rules.host());
            let [batch, _, length, _] = spec.x.shape;
            let [x, d_out] = [&spec.x, d_out].map(|w| data.of::<R>(w));
            let got = spec.stack.on_host::<R, _>(data, |layers, last| {
                let layers: Vec<_> = layers.iter().map(HostLayer::encoder).collect();
                let config = spec.stack.config();
                reference::encoder_backward(&x, [batch, length], &config, &layers, last, &options, &d_out)
            });
            Ok(flat(got.map_err(refuses)?))
        }
        let appends = spec.stack.layers.iter().any(|layer| layer.appended.is_some());
        let mut parts = vec![[d_x, None]];
        parts.extend(gradients.iter().flat_map(|layer| layer.judged(appends)));
        parts.extend(d_final.map(|part| [part.weight, part.bias]));
        let windows: Vec<_> = parts.iter().flatten().collect();
        // Unwanted gradients count too. The largest of all terms counts, because a gradient may be
        // 0 except for rounding.
        let all = |gradients: Vec<[Option<Vec<f64>>; 2]>| -> Vec<Vec<f64>> {
            gradients.into_iter().flatten().map(Option::unwrap_or_default).collect()
        };
        let bytes = &world.arena.before;
        let plain = || Data { bytes, nudged: None };
        let naive = truth::<f32>(&spec, &d_out, &mut plain())?;
        let naive: Vec<_> = naive.into_iter().flatten().map(Option::unwrap_or_default).collect();
        let want = all(truth(&spec, &d_out, &mut plain())?);
        let moved = moves(bytes, &want, |data| Ok(all(truth(&spec, &d_out, data)?)))?;
        let sizes: Vec<_> = want.iter().map(|want| largest(want)).collect();
        let most = largest(&sizes);
        // An error in one gradient moves those before it, too, some of them by luck less. See
        // `stacks::backward`.
        let shares = moved.iter().zip(&sizes).filter(|(_, size)| **size > 1e-3 * most);
        let share = shares.map(|(moved, size)| moved / size).fold(0.0, f64::max);
        for (n, window) in windows.into_iter().enumerate() {
            let Some(window) = window else { continue };
            let naive = widened(&naive[n], window.dtype);
            let own = Tolerance::gradient(&naive, &want[n], most, EPSILON_F32);
            let moved = moved[n].max(share * sizes[n]);
            judge_moved(&format!("gradient {n}"), world, window, (&want[n], own), moved)?;
        }
    }
    Ok(outcome)
}
