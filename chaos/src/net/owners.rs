//! Whose a connection to a peer is. Query nodes learn of peers by the addresses that those advertise, which are the clients'
//! links: they come by the same listeners as the harness's own clients. So the kernel is asked, once for each connection: which
//! process has the socket at the other end?

use std::collections::BTreeMap;
use std::net::{SocketAddr, SocketAddrV4};
use std::path::Path;
use std::sync::{PoisonError, RwLock};

use super::Node;

/// How often the kernel's table is read until it has a connection: it is not read in one piece.
const LOOKS: usize = 3;
/// The fields of a line of that table.
const LOCAL: usize = 1;
const REMOTE: usize = 2;
const INODE: usize = 9;

/// The processes of query nodes.
#[derive(Debug, Default)]
pub(super) struct Owners(RwLock<BTreeMap<u64, u32>>);

impl Owners {
    /// That query node is this process now, or none.
    pub fn set(&self, query_node: u64, pid: Option<u32>) {
        let mut processes = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match pid {
            Some(pid) => processes.insert(query_node, pid),
            None => processes.remove(&query_node),
        };
    }

    /// Who connected from `far` to `near`. `None`: the kernel does not say, so that it might be a query node.
    pub fn of(&self, far: SocketAddr, near: SocketAddr) -> Option<Node> {
        let processes = self.0.read().unwrap_or_else(PoisonError::into_inner).clone();
        let (SocketAddr::V4(far), SocketAddr::V4(near)) = (far, near) else { return Some(Node::Clients) };
        if processes.is_empty() {
            return Some(Node::Clients);
        }
        let inode = (0..LOOKS).find_map(|_| inode_in(&std::fs::read_to_string("/proc/net/tcp").ok()?, far, near))?;
        let has = |(_, pid): &(&u64, &u32)| has_socket(**pid, inode);
        Some(processes.iter().find(has).map_or(Node::Clients, |(id, _)| Node::Query(*id)))
    }
}

/// The inode of the socket that is connected from `local` to `remote`, in the kernel's table of them.
fn inode_in(table: &str, local: SocketAddrV4, remote: SocketAddrV4) -> Option<u64> {
    let (local, remote) = (as_kernel(local), as_kernel(remote));
    table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let is_it = fields.get(LOCAL) == Some(&local.as_str()) && fields.get(REMOTE) == Some(&remote.as_str());
        fields.get(INODE).filter(|_| is_it)?.parse().ok()
    })
}

/// An address as that table has it.
fn as_kernel(address: SocketAddrV4) -> String {
    format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port())
}

fn has_socket(pid: u32, inode: u64) -> bool {
    let descriptors = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd"));
    let socket = format!("socket:[{inode}]");
    let is_it = |path: &Path| std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == socket.as_str());
    descriptors.into_iter().flatten().flatten().any(|descriptor| is_it(&descriptor.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                     0: 0100007F:1F90 0100007F:0050 01 00000000:00000000 00:00000000 00000000  1000        0 77 1 0\n   \
                     1: 0100007F:0050 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 78 1 0\n";
        let at = |port| SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, port);
        // As a machine has it whose lowest byte comes first.
        if cfg!(target_endian = "little") {
            assert_eq!(inode_in(table, at(8080), at(80)), Some(77));
            assert_eq!(inode_in(table, at(80), at(8080)), Some(78));
            assert_eq!(inode_in(table, at(81), at(8080)), None);
        }
    }

    #[test]
    fn a_connection_is_its_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, near) = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let owners = Owners::default();
        assert_eq!(owners.of(far, near), Some(Node::Clients), "there is no query node");
        owners.set(4, Some(std::process::id()));
        assert_eq!(owners.of(far, near), Some(Node::Query(4)));
        owners.set(4, Some(1));
        assert_eq!(owners.of(far, near), Some(Node::Clients), "it is another process's");
        let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
        assert_eq!(owners.of(nobody, near), None, "there is no such connection");
    }
}
