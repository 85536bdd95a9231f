//! The reference of activations.

use crate::matmul::Activation;
use crate::tensor::Real;

/// Returns `f(x)`, rounded once from f64.
pub fn activate<R: Real>(x: R, activation: Activation) -> R {
    let x = x.f64();
    R::of(match activation {
        Activation::Relu if x < 0.0 => 0.0,
        Activation::Relu => x,
        Activation::Gelu => x * below(x),
        Activation::GeluTanh => x * sigmoid(doubled(x)),
        Activation::Silu => x * sigmoid(x),
        Activation::Sigmoid => sigmoid(x),
    })
}

/// Returns `f'(x)`, rounded once from f64. The slope of ReLU at 0 is 0.
pub fn activation_slope<R: Real>(x: R, activation: Activation) -> R {
    let x = x.f64();
    R::of(match activation {
        Activation::Relu => f64::from(u8::from(x > 0.0)),
        Activation::Gelu => below(x) + x * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt(),
        Activation::GeluTanh => {
            let rise = 2.0 * FACTOR * (1.0 + 3.0 * CUBE * x * x);
            slope_of_share(x, doubled(x), rise)
        }
        Activation::Silu => slope_of_share(x, x, 1.0),
        Activation::Sigmoid => sigmoid(x) * sigmoid(-x),
    })
}

/// √(2/π), and the factor of x³ in the tanh approximation.
const FACTOR: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

fn doubled(x: f64) -> f64 {
    2.0 * FACTOR * (x + CUBE * x * x * x)
}

/// The cumulative distribution function of the normal distribution.
fn below(x: f64) -> f64 {
    0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)
}

fn sigmoid(x: f64) -> f64 {
    let e = (-x.abs()).exp();
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

/// The slope of x · sigmoid(u), where `rise` is the slope of u.
fn slope_of_share(x: f64, u: f64, rise: f64) -> f64 {
    let (share, lacks) = (sigmoid(u), sigmoid(-u));
    // For infinite x, sigmoid is 0 or 1, and its slope is 0.
    let bend = if share == 0.0 || lacks == 0.0 { 0.0 } else { x * rise * share * lacks };
    share + bend
}
