//! Numbers that tell if agents attend to each other.

use std::f32::consts::{PI, TAU};

use crate::crowd::{Agent, GROUPS};

/// Agents that are nearer than this are neighbours.
const NEAR: f32 = 0.3;

/// The state of a crowd in two numbers.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// The length of the mean heading of an agent's neighbours in its group, from 0 to 1. It is the
    /// mean over agents.
    pub alignment: f64,
    /// The share of an agent's group among its neighbours, from 0 to 1. It is the mean over agents.
    pub kin: f64,
}

/// Measures a crowd. An agent without neighbours does not count.
pub fn order(agents: &[Agent]) -> Order {
    let (mut alignment, mut kin) = ([0.0; 2], [0.0; 2]);
    for (i, agent) in agents.iter().enumerate() {
        let (mut heading, mut same, mut all) = ([0.0; 2], 0.0, 0.0);
        let near = |other: &Agent| distance_squared(agent.position, other.position) < NEAR * NEAR;
        for (j, other) in agents.iter().enumerate().filter(|(j, other)| *j != i && near(other)) {
            all += 1.0;
            if j % GROUPS == i % GROUPS {
                same += 1.0;
                heading = [0, 1].map(|axis| heading[axis] + f64::from(other.heading[axis]));
            }
        }
        if same > 0.0 {
            alignment = [alignment[0] + heading[0].hypot(heading[1]) / same, alignment[1] + 1.0];
        }
        if all > 0.0 {
            kin = [kin[0] + same / all, kin[1] + 1.0];
        }
    }
    let mean = |[sum, count]: [f64; 2]| sum / f64::max(count, 1.0);
    Order { alignment: mean(alignment), kin: mean(kin) }
}

/// The squared distance on the torus.
fn distance_squared(a: [f32; 2], b: [f32; 2]) -> f32 {
    [0, 1]
        .map(|axis| {
            let apart = (a[axis] - b[axis]).abs();
            let apart = if apart > PI { TAU - apart } else { apart };
            apart * apart
        })
        .iter()
        .sum()
}
