// exp(x) of float32 vectors, for machines without one.
#pragma once

namespace loramux {

namespace {

// 2^n e^r with x = n ln 2 + r and a polynomial of degree 6 in r (Cephes' expf: within 2 ulp). Below -104 it is 0; above 88.3 it stays
// at e^88.3. V also has `round` and `scale`(values, n) = values * 2^n.
template <class V>
[[gnu::always_inline]] inline typename V::F exp_by_polynomial(typename V::F x) {
    x = V::min(V::max(x, V::all(-104.0f)), V::all(88.37626f));
    const typename V::F n = V::round(V::multiply(x, V::all(1.44269504088896341f)));
    typename V::F r = V::multiply_add(n, V::all(-0.693359375f), x);
    r = V::multiply_add(n, V::all(2.12194440e-4f), r);
    typename V::F p = V::all(1.9875691500e-4f);
    constexpr float coefficients[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    for (float coefficient : coefficients) p = V::multiply_add(p, r, V::all(coefficient));
    p = V::add(V::multiply_add(V::multiply(p, r), r, r), V::all(1));
    return V::scale(p, n);
}

}  // namespace

}  // namespace loramux
