package synthetic

// Marginal sets mean and variance [D] to the mean and variance of each element of x at sigma
// in [0, 1]; at sigma 0 they are those of the data.
//
//	mean[i] = a * sum_k Weights[k]*Means[k][i]
//	variance[i] = sum_k Weights[k] * (V[k] + (a*Means[k][i] - mean[i])^2)
func (m *Mixture) Marginal(mean, variance []float64, sigma float64) {
	a := 1 - sigma
	for i := range mean {
		mean[i] = 0
		for k, w := range m.Weights {
			mean[i] += float64(w * a * float64(m.Means[k][i]))
		}
		variance[i] = 0
		for k, w := range m.Weights {
			d := float64(a*float64(m.Means[k][i])) - mean[i]
			variance[i] += float64(w * (m.variance(k, a, sigma) + float64(d*d)))
		}
	}
}
