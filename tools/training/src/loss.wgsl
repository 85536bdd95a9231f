// Computes the loss of each row, the cross-entropy of softmax(logits) and the target. Also counts a
// hit if the target's logit is the largest. The gradient of the mean loss is
// d_logits = (softmax(logits) − onehot(target)) / targets. All are 0 for a row without a target.

@group(0) @binding(0) var<storage, read> step: Step;
@group(0) @binding(1) var<storage, read> targets: array<u32>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> d_logits: array<f32>;
@group(0) @binding(4) var<storage, read_write> losses: array<vec2<f32>>;

@compute @workgroup_size(WIDTH)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let first = id.x * VOCABULARY;
    let wanted = targets[id.x];
    if wanted >= VOCABULARY {
        for (var t = 0u; t < VOCABULARY; t++) {
            d_logits[first + t] = 0.0;
        }
        losses[id.x] = vec2<f32>();
        return;
    }
    var largest = 0u;
    for (var t = 1u; t < VOCABULARY; t++) {
        if logits[first + t] > logits[first + largest] {
            largest = t;
        }
    }
    let maximum = logits[first + largest];
    var sum = 0.0;
    for (var t = 0u; t < VOCABULARY; t++) {
        sum += exp(logits[first + t] - maximum);
    }
    for (var t = 0u; t < VOCABULARY; t++) {
        let hit = select(0.0, 1.0, t == wanted);
        d_logits[first + t] = step.per_target * (exp(logits[first + t] - maximum) / sum - hit);
    }
    losses[id.x] = vec2(log(sum) + maximum - logits[first + wanted], select(0.0, 1.0, largest == wanted));
}
