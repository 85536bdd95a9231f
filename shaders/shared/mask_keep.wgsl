fn mask_keep_permits(s: Site) -> bool {
    return keep_at(view_at(p.mask.keep, s.b, s.h, s.i, s.j));
}
