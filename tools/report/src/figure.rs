//! Numbers as text.

/// Formats three significant digits, and all digits of the integer part.
pub fn digits(x: f64) -> String {
    let whole = if x.abs() > 0.0 && x.is_finite() { x.abs().log10().floor() as i32 } else { 0 };
    format!("{x:.*}", (2 - whole).clamp(0, 6) as usize)
}

/// Formats bytes with a suitable unit.
pub fn memory(bytes: f64) -> String {
    if bytes == 0.0 {
        return "none".into();
    }
    let (scale, unit) = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")]
        .into_iter()
        .find(|(scale, _)| bytes >= *scale)
        .unwrap_or((1.0, "B"));
    format!("{} {unit}", digits(bytes / scale))
}
