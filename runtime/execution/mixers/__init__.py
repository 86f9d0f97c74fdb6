"""What stands between a layer's input norm and the product whose result is added to the residual."""
