//! Circles of dependencies, and their names.
//!
//! Every circle lies within one strongly connected component (Tarjan), so that components of one node need no look.
//! Within another the classes are tried from the worst on, and the shortest circle of the first that has one is shown.

use std::collections::VecDeque;

use super::super::bars::{Bar, Edge};
use super::super::outcome::{Finding, Findings};
use super::graph::{Dependency, Graph, REALTIME, RW, WR, WW};
use super::observed::Observed;

/// Nodes visited within one component in search of a short circle of one class.
const MAX_VISITS: usize = 4_000_000;

/// One kind of circle: the edges that it may have, and whether exactly one of them is an rw.
struct Class {
    name: &'static str,
    mask: u8,
    one_rw: bool,
}

/// From the worst on.
const CLASSES: [Class; 8] = [
    Class { name: "G0", mask: WW, one_rw: false },
    Class { name: "G1c", mask: WW | WR, one_rw: false },
    Class { name: "G-single", mask: WW | WR | RW, one_rw: true },
    Class { name: "G2", mask: WW | WR | RW, one_rw: false },
    Class { name: "G0-realtime", mask: WW | REALTIME, one_rw: false },
    Class { name: "G1c-realtime", mask: WW | WR | REALTIME, one_rw: false },
    Class { name: "G-single-realtime", mask: WW | WR | RW | REALTIME, one_rw: true },
    Class { name: "G2-realtime", mask: WW | WR | RW | REALTIME, one_rw: false },
];

/// Adds one finding for each knot of circles.
pub(super) fn find(observed: &Observed<'_>, graph: &Graph, findings: &mut Findings) {
    let everything: Vec<u32> = (0..graph.node_count() as u32).collect();
    let mut within = Within { graph, component: vec![0; graph.node_count()] };
    for component in components(&within, &everything, u8::MAX) {
        component.iter().for_each(|&node| within.component[node as usize] = component[0] + 1);
        let worst = CLASSES.iter().find_map(|class| Some((class, circle(&within, &component, class)?)));
        component.iter().for_each(|&node| within.component[node as usize] = 0);
        if let Some((class, circle)) = worst {
            findings.add(class.name, || explain(observed, graph, class, &circle));
        }
    }
}

/// The part of a graph that one search looks at: nodes of the same component.
struct Within<'a> {
    graph: &'a Graph,
    /// By node; 0 at first.
    component: Vec<u32>,
}

impl<'a> Within<'a> {
    fn from(&self, node: u32, mask: u8) -> impl Iterator<Item = &'a Dependency> {
        let component = self.component[node as usize];
        let inside = move |to: u32| self.component[to as usize] == component;
        self.graph.from(node).iter().filter(move |d| d.kind & mask != 0).filter(move |d| inside(d.to))
    }
}

/// Strongly connected components of more than one node, by Tarjan's algorithm with a stack of its own.
fn components(within: &Within<'_>, nodes: &[u32], mask: u8) -> Vec<Vec<u32>> {
    const UNSEEN: u32 = u32::MAX;
    let count = within.graph.node_count();
    let (mut number, mut low) = (vec![UNSEEN; count], vec![0; count]);
    let (mut open, mut is_open) = (Vec::new(), vec![false; count]);
    let mut found = Vec::new();
    let mut next = 0;
    for &root in nodes {
        if number[root as usize] != UNSEEN {
            continue;
        }
        let mut calls = vec![(root, within.from(root, mask))];
        (number[root as usize], low[root as usize]) = (next, next);
        next += 1;
        open.push(root);
        is_open[root as usize] = true;
        while let Some((node, edges)) = calls.last_mut() {
            let node = *node;
            if let Some(edge) = edges.next() {
                let to = edge.to;
                if number[to as usize] == UNSEEN {
                    (number[to as usize], low[to as usize]) = (next, next);
                    next += 1;
                    open.push(to);
                    is_open[to as usize] = true;
                    calls.push((to, within.from(to, mask)));
                } else if is_open[to as usize] {
                    low[node as usize] = low[node as usize].min(number[to as usize]);
                }
                continue;
            }
            calls.pop();
            if let Some((parent, _)) = calls.last() {
                low[*parent as usize] = low[*parent as usize].min(low[node as usize]);
            }
            if low[node as usize] == number[node as usize] {
                let at = open.iter().rposition(|&other| other == node).unwrap_or(0);
                let component = open.split_off(at);
                component.iter().for_each(|&other| is_open[other as usize] = false);
                if component.len() > 1 {
                    found.push(component);
                }
            }
        }
    }
    found
}

/// A short circle of a class within a component: each edge with the node it comes from.
fn circle(within: &Within<'_>, component: &[u32], class: &Class) -> Option<Vec<(u32, Dependency)>> {
    let without_rw = if class.one_rw { class.mask & !RW } else { class.mask };
    // Which edges to begin with: for one rw, that one; else any within a component of the class's own edges.
    let own = match class.one_rw {
        true => component.to_vec(),
        false => components(within, component, class.mask).into_iter().next()?,
    };
    let mut visits = MAX_VISITS;
    let mut best: Option<Vec<(u32, Dependency)>> = None;
    for &from in &own {
        let begin = if class.one_rw { RW } else { class.mask };
        for edge in within.from(from, begin) {
            let longest = best.as_ref().map_or(usize::MAX, Vec::len);
            let Some(way) = way(within, edge.to, from, without_rw, longest.saturating_sub(1), &mut visits) else {
                continue;
            };
            let circle: Vec<_> = std::iter::once((from, *edge)).chain(way).collect();
            // Two is as short as a circle gets, three if it passes one of the nodes that are no transactions.
            if circle.len() <= 2 {
                return Some(circle);
            }
            if circle.len() < longest {
                best = Some(circle);
            }
        }
        if visits == 0 {
            break;
        }
    }
    best
}

/// The shortest way from one node to another, if it has fewer than `below` edges.
fn way(
    within: &Within<'_>,
    from: u32,
    to: u32,
    mask: u8,
    below: usize,
    visits: &mut usize,
) -> Option<Vec<(u32, Dependency)>> {
    let mut came_by: std::collections::HashMap<u32, Option<(u32, Dependency)>> = [(from, None)].into();
    let mut queue = VecDeque::from([(from, 0)]);
    while let Some((node, length)) = queue.pop_front() {
        if node == to {
            let (mut way, mut at) = (Vec::new(), to);
            while let Some(Some((before, edge))) = came_by.get(&at) {
                way.push((*before, *edge));
                at = *before;
            }
            way.reverse();
            return Some(way);
        }
        if length + 1 >= below {
            continue;
        }
        *visits = visits.checked_sub(1)?;
        for edge in within.from(node, mask) {
            came_by.entry(edge.to).or_insert_with(|| {
                queue.push_back((edge.to, length + 1));
                Some((node, *edge))
            });
        }
    }
    None
}

fn explain(observed: &Observed<'_>, graph: &Graph, class: &Class, circle: &[(u32, Dependency)]) -> Finding {
    let edges = without_unread(graph, circle);
    let mut order: Vec<u32> = edges.iter().map(|(from, _)| *from).collect();
    order.sort_unstable();
    order.dedup();
    let at = |node: u32| order.iter().position(|&other| other == node).unwrap_or(0);
    let calls = order.iter().map(|&node| observed.transactions[node as usize].call);
    let bars: Vec<Bar> = calls.map(|call| Bar::of(observed.history, call)).collect();
    let edges: Vec<Edge> = edges
        .iter()
        .map(|(from, edge)| {
            let (from, to) = (at(*from), at(edge.to));
            Edge { from, to, kind: kind_name(edge.kind).into(), because: because(observed, &bars, from, to, edge) }
        })
        .collect();
    let mut explanation =
        vec![format!("{}: {} transactions that each must come before the next, in a circle", class.name, bars.len())];
    explanation.extend(edges.iter().map(|edge| format!("{} ({}).", edge.because, edge.kind)));
    Finding { kind: class.name.to_owned(), explanation, bars, edges }
}

/// Joins the two edges by which a circle passes a node that is no transaction: the kind of the first, the element of
/// the second.
fn without_unread(graph: &Graph, circle: &[(u32, Dependency)]) -> Vec<(u32, Dependency)> {
    let is_transaction = |node: u32| (node as usize) < graph.transactions;
    let mut joined = Vec::new();
    for (i, (from, edge)) in circle.iter().enumerate() {
        match (is_transaction(*from), is_transaction(edge.to)) {
            (true, true) => joined.push((*from, *edge)),
            (true, false) => {
                let (_, second) = circle[(i + 1) % circle.len()];
                joined.push((*from, Dependency { kind: edge.kind, ..second }));
            }
            (false, _) => {}
        }
    }
    joined
}

fn kind_name(kind: u8) -> &'static str {
    match kind {
        WW => "ww",
        WR => "wr",
        RW => "rw",
        _ => "realtime",
    }
}

fn because(observed: &Observed<'_>, bars: &[Bar], from: usize, to: usize, edge: &Dependency) -> String {
    let name = |bar: usize| format!("T{} (process {})", bar + 1, bars[bar].process);
    let (from, to, value) = (name(from), name(to), edge.value);
    let key = observed.keys.get(edge.key as usize).map_or_else(String::new, |key| key.to_string());
    match edge.kind {
        WW => format!("{to} appended {value} to key {key} after {from} had appended to it"),
        WR => format!("{to} read {value} in key {key}, which {from} appended"),
        RW => format!("{from} read key {key} without {value}, which {to} appended"),
        _ => format!("{from} ended before {to} began"),
    }
}
