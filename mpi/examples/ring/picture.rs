//! Draws a timeline: when each rank's device worked, and when its host staged and waited.

use std::error::Error;
use std::path::Path;

use canvas::{Canvas, Colour, GREY, LABEL, SMALL, SUBHEADING};
use wgpu_attention_mpi::Timeline;

const LEFT: usize = 90;
const TOP: usize = 110;
const WIDTH: usize = 1200;
const ROW: usize = 64;

const WORK: Colour = [33, 102, 172];
const OTHER_WORK: Colour = [103, 169, 207];
const STAGE: Colour = [166, 97, 26];
const WAIT: Colour = [223, 194, 125];

pub fn draw(title: &str, timelines: &[Timeline], to: &Path) -> Result<(), Box<dyn Error>> {
    let total = timelines.iter().fold(f64::MIN_POSITIVE, |most, timeline| most.max(timeline.total));
    let height = TOP + timelines.len() * ROW + 70;
    let mut canvas = Canvas::new(LEFT + WIDTH + 40, height);
    let x = |seconds: f64| LEFT + (seconds.max(0.0) / total * WIDTH as f64) as usize;
    canvas.text([LEFT, 16], title, SUBHEADING);
    let mut left = LEFT;
    let legend =
        [(WORK, "device, by turns"), (OTHER_WORK, "of steps"), (STAGE, "host stages"), (WAIT, "host waits")];
    for (colour, text) in legend {
        canvas.fill([left, 56], [20, 16], colour);
        canvas.text([left + 28, 54], text, LABEL);
        left += 60 + text.len() * LABEL.width();
    }
    for (rank, timeline) in timelines.iter().enumerate() {
        let y = TOP + rank * ROW;
        canvas.text([10, y + 6], &format!("rank {rank}"), LABEL);
        for (n, step) in timeline.steps.iter().enumerate() {
            let start = step.done - timeline.worked(n);
            let [from, to] = [x(start), x(step.done)];
            let colour = if n % 2 == 0 { WORK } else { OTHER_WORK };
            canvas.fill([from, y], [to.saturating_sub(from).max(1), 28], colour);
            let text = step.owner.to_string();
            if to.saturating_sub(from) > text.len() * SMALL.width() + 6 {
                canvas.text([from + 4, y + 6], &text, SMALL.coloured([255; 3]));
            }
            // The host waits for a block, stages it, then submits the step.
            let staged = step.submitted - step.staged;
            let waited = staged - step.waited;
            for (from, to, colour) in [(waited, staged, WAIT), (staged, step.submitted, STAGE)] {
                let [from, to] = [x(from), x(to)];
                canvas.fill([from, y + 32], [to.saturating_sub(from).max(1), 12], colour);
            }
        }
    }
    let bottom = TOP + timelines.len() * ROW + 6;
    canvas.fill([LEFT, bottom], [WIDTH, 1], GREY);
    for n in 0..=5 {
        let seconds = total * f64::from(n) / 5.0;
        let text = format!("{:.0} ms", 1e3 * seconds);
        let at = x(seconds).saturating_sub(text.len() * SMALL.width() / 2);
        canvas.text([at, bottom + 8], &text, SMALL.coloured(GREY));
    }
    canvas.text(
        [LEFT, bottom + 32],
        "numbers: whose keys; each rank's time is its own, from the ranks' agreement on",
        SMALL.coloured(GREY),
    );
    canvas.save(to)
}
