fn mask_keys_permits(s: Site) -> bool {
    return keys_at(view_at(p.mask.keys, s.b, s.h, s.i, s.j));
}
