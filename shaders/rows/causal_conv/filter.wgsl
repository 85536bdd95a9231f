// The filters of four channels, and their sums before the activation.
//
// Needs: p.weight, p.bias, p.channels; HAS_BIAS, WIDTH; view_at, weight_at4, bias_at4, window.
// Gives: load_filter, sum4, weights.

var<private> weights: array<vec4<f32>, WIDTH>;
var<private> bias4: vec4<f32>;

fn load_filter(d: u32) {
    let n = p.channels - d;
    /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
        weights[j] = weight_at4(view_at(p.weight, 0u, 0u, d, j), p.weight.strides.z, n);
    }
    if HAS_BIAS {
        bias4 = bias_at4(view_at(p.bias, 0u, 0u, 0u, d), p.bias.strides.w, n);
    }
}

// The sum of the window's rows. The oldest row comes first, so calls that continue each other give
// the same bits as one call.
fn sum4() -> vec4<f32> {
    var sum = vec4<f32>();
    if HAS_BIAS {
        sum = bias4;
    }
    /* unrolled */ for (var j = 0u; j < WIDTH; j++) {
        sum = fma(weights[j], window[j], sum);
    }
    return sum;
}
