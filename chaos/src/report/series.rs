//! Throughput and latency over time, in equal pieces of the run.

use super::results::quantile;
use crate::history::{History, Outcome};

/// Most pieces.
const MAX_PIECES: u64 = 240;
/// No piece is shorter.
const MIN_PIECE_NS: u64 = 100_000_000;

/// One piece of time. Operations belong to the piece in which they ended; those that never did, to that of their start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    pub ok: u64,
    pub refused: u64,
    pub failed: u64,
    pub unknown: u64,
    /// Of those that succeeded, in nanoseconds; none if there were none.
    pub p50_ns: Option<u64>,
    pub p99_ns: Option<u64>,
}

/// A run in pieces.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Series {
    pub piece_ns: u64,
    pub pieces: Vec<Piece>,
}

impl Series {
    /// Sorts the operations of a history into pieces of time.
    pub fn of(history: &History) -> Series {
        let end = history.operations().iter().map(|operation| operation.time_ns).max().unwrap_or(0);
        let piece_ns = (end / MAX_PIECES + 1).max(MIN_PIECE_NS);
        let count = usize::try_from(end / piece_ns + 1).unwrap_or(1);
        let mut pieces = vec![Piece::default(); count];
        let mut latencies_ns: Vec<Vec<u64>> = vec![Vec::new(); count];
        for call in history.calls() {
            let begun = history.invocation(call).time_ns;
            let ended = history.end(call);
            let at = ended.map_or(begun, |end| end.time_ns);
            let at = usize::try_from(at / piece_ns).unwrap_or(0).min(count - 1);
            let piece = &mut pieces[at];
            match call.outcome {
                Outcome::Ok => {
                    piece.ok += 1;
                    latencies_ns[at].extend(ended.map(|end| end.time_ns.saturating_sub(begun)));
                }
                Outcome::Fail if ended.is_some_and(|end| end.refusal.is_some()) => piece.refused += 1,
                Outcome::Fail => piece.failed += 1,
                Outcome::Unknown => piece.unknown += 1,
            }
        }
        for (piece, latencies_ns) in pieces.iter_mut().zip(&mut latencies_ns) {
            latencies_ns.sort_unstable();
            (piece.p50_ns, piece.p99_ns) = (quantile(latencies_ns, 50), quantile(latencies_ns, 99));
        }
        Series { piece_ns, pieces }
    }

    /// How long all pieces are together, in nanoseconds.
    pub fn length_ns(&self) -> u64 {
        self.piece_ns * self.pieces.len() as u64
    }

    /// So many in one piece, per second.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 * 1e9 / self.piece_ns as f64
    }
}
