"""What calibration needs: Hessians and the GPTQ solve."""
