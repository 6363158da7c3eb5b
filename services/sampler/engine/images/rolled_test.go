package images

import (
	"math"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// A rollout begins where there is no data, at the last timestep of a table with zero terminal SNR: the model sees a
// finite sigma there, and one that is right lands on the teacher-forced latent.
func TestRolling_ZeroSNR(t *testing.T) {
	config := []byte(`{"_class_name": "DDIMScheduler", "prediction_type": "v_prediction", "rescale_betas_zero_snr": true}`)
	x0 := []float32{0.5, -1, 2}
	for _, compat := range []string{"exact", "simpletuner"} {
		for _, name := range []string{"euler", "dpm", "unipc", "unip"} {
			s := &schemas.ScheduledSample{
				RollSettings: schemas.RollSettings{Timesteps: 1000, Prediction: "v_prediction", Sampler: name, Order: 2, Compat: compat},
				Roll:         schemas.Roll{Timestep: 995, Base: 995, Source: 999, Offset: 4},
			}
			if name == "euler" {
				s.RollSettings.Order = 1
			}
			r, err := NewRolling(config, s, "F32", append([]float32{}, x0...), 7)
			if err != nil {
				t.Fatal(err)
			}
			noise := drawNoise(7, len(x0))
			for !r.Done() {
				_, sigma := r.Point()
				if math.IsInf(float64(sigma), 0) || sigma < 1 {
					t.Fatalf("%s, %s: sigma %v; must be finite", compat, name, sigma)
				}
				scale := math.Sqrt(1 + float64(sigma)*float64(sigma))
				v := make([]float32, len(x0))
				for i := range v {
					v[i] = float32((float64(noise[i]) - float64(sigma)*float64(x0[i])) / scale)
				}
				if _, _, err := r.Advance(v); err != nil {
					t.Fatalf("%s, %s: %v", compat, name, err)
				}
			}
			for i, x := range r.Latents {
				// The public trainer walks the table the wrong way: its latent is finite, and not the teacher's.
				if d := math.Abs(float64(x - r.Teacher[i])); compat == "exact" && !(d < 1e-5) || !(d < 3) {
					t.Errorf("%s, %s: latent %d is %v, want %v", compat, name, i, x, r.Teacher[i])
				}
			}
		}
	}
}
