//! The moves of rows after which sequences continue from their parents.

/// A move of the rows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowMove {
    pub to: usize,
    pub from: usize,
    /// True if both sequences exchange their rows.
    pub exchange: bool,
}

/// Returns moves after which each sequence has the rows that its parent had before. A sequence is
/// overwritten only after the last move that reads it. If sequences form a circle, exchanges
/// resolve it.
pub(super) fn row_moves(parents: &[usize]) -> Vec<RowMove> {
    let mut children = vec![0; parents.len()];
    let mut waits: Vec<bool> = parents.iter().enumerate().map(|(s, parent)| s != *parent).collect();
    for (_, parent) in parents.iter().enumerate().filter(|(s, parent)| s != *parent) {
        children[*parent] += 1;
    }
    let mut ready: Vec<usize> = (0..parents.len()).filter(|s| waits[*s] && children[*s] == 0).collect();
    let mut moves = Vec::new();
    while let Some(to) = ready.pop() {
        let from = parents[to];
        moves.push(RowMove { to, from, exchange: false });
        waits[to] = false;
        children[from] -= 1;
        if waits[from] && children[from] == 0 {
            ready.push(from);
        }
    }
    // Each remaining sequence is now the parent of exactly one other remaining sequence.
    for first in 0..parents.len() {
        let mut to = first;
        while waits[to] {
            waits[to] = false;
            let from = parents[to];
            if from != first {
                moves.push(RowMove { to, from, exchange: true });
            }
            to = from;
        }
    }
    moves
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries every list of up to five parents. After the moves each sequence has its parent's rows.
    #[test]
    fn row_moves_follow_all_parents() {
        for batch in 1..=5usize {
            for list in 0..batch.pow(batch as u32) {
                let parents: Vec<_> = (0..batch as u32).map(|n| list / batch.pow(n) % batch).collect();
                let mut rows: Vec<_> = (0..batch).collect();
                let moves = row_moves(&parents);
                assert!(moves.len() <= batch, "{parents:?}");
                for RowMove { to, from, exchange } in moves {
                    assert_ne!(to, from, "{parents:?}");
                    match exchange {
                        true => rows.swap(to, from),
                        false => rows[to] = rows[from],
                    }
                }
                assert_eq!(rows, parents);
            }
        }
    }
}
