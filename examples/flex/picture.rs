//! Draws the attention of three pixels of an image.

use std::fmt::Write;

/// A picture of attention among the pixels of an image with sides of `side`. It has a row for each
/// function. A row has an image for each head and each of three pixels.
pub struct Picture {
    side: usize,
    rows: usize,
    columns: usize,
    svg: String,
}

impl Picture {
    pub fn new(side: usize) -> Self {
        Picture { side, rows: 0, columns: 0, svg: String::new() }
    }

    /// Adds a row with the weights `[heads, pixels, pixels]`.
    pub fn row(&mut self, heads: usize, weights: &[f32]) -> std::fmt::Result {
        let side = self.side;
        let pixels = [[1, 2], [side / 2, side / 3], [side - 2, side - 6]];
        self.columns = heads * pixels.len();
        for (column, (head, [y, x])) in (0..heads).flat_map(|h| pixels.map(|pixel| (h, pixel))).enumerate() {
            let [left, top] = [column, self.rows].map(|n| n * (side + 2) + 1);
            let query = (head * side + y) * side + x;
            let of_query = &weights[query * side * side..][..side * side];
            let most = of_query.iter().copied().fold(f32::MIN_POSITIVE, f32::max);
            let svg = &mut self.svg;
            writeln!(
                svg,
                "<rect x=\"{left}\" y=\"{top}\" width=\"{side}\" height=\"{side}\" fill=\"#eef2f7\"/>"
            )?;
            for (n, weight) in of_query.iter().enumerate().filter(|(_, weight)| **weight > 0.002 * most) {
                let (x, y, shade) = (left + n % side, top + n / side, (weight / most).sqrt());
                writeln!(svg, "<path d=\"M{x} {y}h1v1h-1z\" fill=\"#1b3a5a\" opacity=\"{shade:.2}\"/>")?;
            }
            let (x, y) = (left + x, top + y);
            writeln!(
                svg,
                "<path d=\"M{x} {y}h1v1h-1z\" fill=\"none\" stroke=\"#e4572e\" stroke-width=\".3\"/>"
            )?;
        }
        self.rows += 1;
        Ok(())
    }

    pub fn save(&self, path: &str) -> std::io::Result<()> {
        let [width, height] = [self.columns, self.rows].map(|n| n * (self.side + 2));
        let size =
            format!("width=\"{}\" height=\"{}\" viewBox=\"0 0 {width} {height}\"", 4 * width, 4 * height);
        std::fs::write(
            path,
            format!("<svg xmlns=\"http://www.w3.org/2000/svg\" {size}>\n{}</svg>\n", self.svg),
        )
    }
}

/// Pseudorandom numbers from −2 to 2.
pub fn noise(shape: [usize; 4], seed: usize) -> Vec<f32> {
    (0..shape.iter().product())
        .map(|i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 500.0 - 2.0)
        .collect()
}
